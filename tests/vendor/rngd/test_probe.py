"""What is said of a machine without a card: each question in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import rowlock

AUTOLOAD_OFF = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def child(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **AUTOLOAD_OFF},
        check=False,
    )


def no_card() -> bool:
    return not list(Path("/dev").glob("rngd*"))


pytestmark = pytest.mark.skipif(not no_card(), reason="this machine has a card")


def test_doctor_says_what_is_missing(tmp_path: Path) -> None:
    looked = rowlock("doctor", "--device", "rngd:0", "--state", tmp_path / "state", "--json")
    assert looked.code == 3
    found = {item["name"]: item for item in looked.json["findings"]}
    assert found["furiosa-torch"]["ok"]
    assert "furiosa-torch 2026.4.0" in found["furiosa-torch"]["detail"]
    assert [name for name, item in found.items() if not item["ok"]] == ["driver", "cards", "device"]
    assert "no available device" in found["driver"]["detail"]
    assert "--without-hardware" in found["device"]["detail"]


def test_doctor_without_hardware_looks_at_the_evaluator(tmp_path: Path) -> None:
    looked = rowlock("doctor", "--device", "rngd:5", "--state", tmp_path / "state", "--without-hardware", "--json")
    found = {item["name"]: item for item in looked.json["findings"]}
    assert looked.code == 0, looked.out
    assert found["evaluator"]["detail"] == "computes what torch does"
    assert "driver" not in found


def test_a_daemon_refuses_with_the_reason_and_leaves_nothing(tmp_path: Path, tiny: Path) -> None:
    served = rowlock(
        "serve", "--device", "rngd:0", "--checkpoint", tiny, "--state", tmp_path / "state",
        ROWLOCK_RUNTIME_DIR=str(tmp_path),
    )  # fmt: skip
    assert served.code == 3
    assert "device rngd:0 cannot be used" in served.err
    assert "furiosa:0 is not there" in served.err
    assert not (tmp_path / "state").exists()


def test_the_library_would_have_said_yes() -> None:
    """Why the probe names a device: asked without a name, the package always says that it is available."""
    done = child("import furiosa.torch as ft; print(ft.is_available(), ft.is_available('furiosa:0'))")
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_a_whole_card_is_one_device_if_that_is_settled_first() -> None:
    done = child(
        "import furiosa.torch as ft\nfrom rowlock.bindings.rngd import sdk\n"
        "sdk.claim_fusion(); sdk.claim_fusion()\nprint(sdk.is_present(3), len(ft.get_available_devices()))"
    )
    assert done.stdout.split() == ["False", "8"], done.stderr


def test_another_number_that_was_settled_first_is_refused() -> None:
    done = child(
        "import furiosa.torch as ft\nfrom rowlock.bindings.rngd import sdk\n"
        "from rowlock.bindings.device import DeviceError\n"
        "ft.get_available_devices()\n"
        "try: sdk.claim_fusion()\nexcept DeviceError as error: print(error.fault, error)"
    )
    assert done.stdout.startswith("UNSUPPORTED this process has 1 processing elements as one device"), done.stderr


@pytest.mark.parametrize("index", [0, 3])
def test_a_card_that_is_not_there_is_lost_and_not_out_of_memory(index: int) -> None:
    """The library's own word for it is OutOfMemoryError."""
    done = child(
        "from pathlib import Path\nfrom rowlock.bindings.device import DeviceError\n"
        "from rowlock.bindings.model.layout import ParentInfo\nfrom rowlock.bindings.rngd import sdk\n"
        "from rowlock.bindings.rngd.engine import CardEngine\nfrom rowlock.bindings.rngd.storage import RngdDevice\n"
        f"sdk.claim_fusion()\nsdk.register()\nengine = CardEngine({index}, Path('/nowhere'))\n"
        "for call in (engine.probe, engine.fence, lambda: RngdDevice(engine).create(ParentInfo('p', 'BF16', 4, 8))):\n"
        "    try: call()\n    except DeviceError as error: print(error.fault, error)"
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOST")]  # the library logs to stdout too
    assert len(lines) == 3, done.stderr
    assert lines[0] == lines[2] == f"LOST furiosa:{index} is not there"
    assert lines[1].startswith("LOST the fence: ")


def test_opening_a_card_that_is_not_there_registers_nothing() -> None:
    done = child(
        "import torch\nfrom pathlib import Path\nfrom rowlock.bindings.address import DeviceAddress\n"
        "from rowlock.bindings.device import DeviceError\nfrom rowlock.bindings.rngd.binding import open_rngd\n"
        "try: open_rngd(DeviceAddress('rngd', 2, 2), Path('/nowhere'), without_hardware=False)\n"
        "except DeviceError as error: print(error.fault, error, torch._C._get_privateuse1_backend_name(), sep='|')"
    )
    assert done.stdout.strip() == "LOST|furiosa:2 is not there|privateuseone", done.stderr
