"""Looking for an ATOM device, and refusing, in the vendor's environment and without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import standin
from support.commands import Finished, rowlock
from support.devices import DEVICES, device_of_owners

in_environment = pytest.mark.skipif(
    device_of_owners() is not DEVICES["atom"], reason="ATOM: run `make test-atom`, which has torch-rbln"
)


# What a stand-in that is loaded into this process has set, a child shall find unset.
UNSET = {"RBLN_VISIBLE_DEVICES": "", "RBLN_DUMMY_DEVICE": ""}


def doctor(tmp_path: Path, *options: str, **environment: str) -> Finished:
    return rowlock(
        "doctor", "--device", "atom:0", "--state", tmp_path / "s", *options, "--json",
        **{**UNSET, "ROWLOCK_RUNTIME_DIR": str(tmp_path), **environment},
    )  # fmt: skip


def findings(found: Finished) -> dict[str, tuple[bool, str]]:
    return {item["name"]: (item["ok"], item["detail"]) for item in found.json["findings"]}


def serve(tmp_path: Path, *options: str, **environment: str) -> Finished:
    return rowlock(
        "serve", "--device", "atom:0", "--state", tmp_path / "s", *options,
        **{**UNSET, "ROWLOCK_RUNTIME_DIR": str(tmp_path), **environment},
    )  # fmt: skip


@pytest.mark.skipif(standin.wheel() is not None, reason="this is the environment that has torch-rbln")
def test_the_wrong_environment_is_refused_with_the_command_that_makes_the_right_one(tmp_path: Path) -> None:
    refused = serve(tmp_path)
    assert refused.code == 3
    assert "torch-rbln 0.12.0 is not installed" in refused.err
    assert "make env-atom" in refused.err
    assert not (tmp_path / "s").exists()
    ok, detail = findings(doctor(tmp_path))["environment"]
    assert (ok, "make env-atom" in detail) == (False, True)


@in_environment
def test_the_cpu_can_be_owned_in_this_environment_too(tmp_path: Path) -> None:
    """torch would load torch-rbln by itself, and fail for want of its runtime library: that is switched off in time."""
    found = rowlock(
        "doctor", "--device", "cpu", "--state", tmp_path / "s", "--json",
        ROWLOCK_RUNTIME_DIR=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="1", LD_LIBRARY_PATH="",
    )  # fmt: skip
    assert (found.code, findings(found)["device"][0]) == (0, True)


@in_environment
def test_the_variables_of_the_stand_in_are_printed_for_a_shell() -> None:
    """As scripts/on-device.sh asks for them, in a process that has loaded nothing."""
    done = subprocess.run(
        [sys.executable, "-m", "support.standin"],
        env={**os.environ, "PYTHONPATH": str(Path(standin.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [f"export {name}={value}" for name, value in standin.environment(standin.build()).items()]
    assert done.stdout.splitlines() == lines


@in_environment
def test_no_runtime_library(tmp_path: Path) -> None:
    found = findings(doctor(tmp_path, "--without-hardware", LD_LIBRARY_PATH=""))
    assert found["librbln.so"][0] is False
    assert "Could not find librbln.so" in found["librbln.so"][1]
    refused = serve(tmp_path, "--without-hardware", LD_LIBRARY_PATH="")
    assert (refused.code, "Could not find librbln.so" in refused.err) == (3, True)
    assert not (tmp_path / "s").exists()


@in_environment
def test_a_runtime_library_of_another_interface(tmp_path: Path) -> None:
    found = findings(doctor(tmp_path, "--without-hardware", **standin.environment(standin.build()), STANDIN_ABI="9"))
    assert found["librbln.so"][0] is False
    assert "RBLN ABI mismatch" in found["librbln.so"][1]


@in_environment
def test_a_dummy_device_is_no_device(tmp_path: Path) -> None:
    found = findings(doctor(tmp_path, **standin.environment(standin.build())))
    assert found["driver"] == (False, "/dev/rbln0 is not there: no driver, or no card")
    assert found["device"][0] is False
    assert "RBLN_DUMMY_DEVICE is set" in found["device"][1]
    accepted = doctor(tmp_path, "--without-hardware", **standin.environment(standin.build()))
    assert accepted.code == 0
    assert "host-reference, readback proves unproven" in findings(accepted)["device"][1]


@in_environment
def test_a_library_that_ends_the_process_is_refused(tmp_path: Path) -> None:
    """Without the dummy device torch-rbln asks the library for its devices; the stand-in aborts at that."""
    environment = {**standin.environment(standin.build()), **UNSET}
    found = findings(doctor(tmp_path, "--without-hardware", **environment))
    assert found["librbln.so"] == (True, "loaded")
    assert found["probe"][0] is False
    assert "was ended by SIGABRT after looking at 'librbln.so'" in found["probe"][1]
    assert "the stand-in has no rbln_get_device_count" in found["probe"][1]


@in_environment
def test_another_numbering_is_refused(tmp_path: Path) -> None:
    refused = serve(tmp_path, "--without-hardware", RBLN_DEVICE_MAP="[0]")
    assert (refused.code, "RBLN_DEVICE_MAP=[0] numbers the devices in another way" in refused.err) == (3, True)


@in_environment
def test_a_hidden_device_is_refused(tmp_path: Path) -> None:
    assert "RBLN_DEVICES" not in os.environ
    refused = serve(tmp_path, "--without-hardware", RBLN_VISIBLE_DEVICES="1,2")
    assert (refused.code, "RBLN_VISIBLE_DEVICES=1,2 hides device 0" in refused.err) == (3, True)
