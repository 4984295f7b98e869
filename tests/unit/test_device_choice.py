"""From a device's name to a process that may load its library, without loading one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.commands import rowlock

from rowlock.bindings.address import DeviceAddress
from rowlock.daemon.device_kinds import DEVICE_KINDS, DeviceKind
from rowlock.daemon.devices import parse_device, select_device
from rowlock.daemon.environments import (
    AUTOLOAD_VARIABLE,
    DeviceRefusedError,
    Environment,
    Visibility,
    installed_version,
)
from rowlock.daemon.probing import run_probe

VISIBILITY = Visibility("TPU_VISIBLE", {"TPU_ORDER": "bus"}, conflicts=("TPU_MAP",))


def never(*_args: object) -> object:
    raise AssertionError("nothing is opened here")


def kinds(environment: Environment | None = None, visibility: Visibility | None = VISIBILITY) -> dict[str, DeviceKind]:
    return {"tpu": DeviceKind(True, never, None, environment, visibility)}  # type: ignore[arg-type]


def test_a_name_says_kind_and_physical_number() -> None:
    assert parse_device("tpu:3", kinds())[1] == DeviceAddress("tpu", 3, 0)
    assert parse_device("tpu:3", kinds(visibility=None))[1] == DeviceAddress("tpu", 3, 3)
    assert parse_device("tpu:3", kinds())[1].name == "tpu:3"
    assert parse_device("cpu")[0] is DEVICE_KINDS["cpu"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("xpu:0", "no binding for device 'xpu:0'; this version drives: "),
        ("tpu", "needs a number"),
        ("tpu:", "needs a number"),
        ("tpu:-1", "needs a number"),
        ("tpu:01", "needs a number"),
        ("tpu:0/../x", "needs a number"),
        ("", "no binding for device ''"),
    ],
)
def test_other_names_are_refused(name: str, why: str) -> None:
    with pytest.raises(DeviceRefusedError, match=why):
        parse_device(name, kinds())


def test_the_only_cpu_has_no_number() -> None:
    with pytest.raises(DeviceRefusedError, match="there is only one"):
        parse_device("cpu:1")


def test_the_process_sees_that_device_alone() -> None:
    environment = {"TPU_VISIBLE": "1, 3"}
    _, address = select_device("tpu:3", environment, kinds())
    assert (address.physical, address.logical) == (3, 0)
    assert environment == {"TPU_VISIBLE": "3", "TPU_ORDER": "bus", AUTOLOAD_VARIABLE: "0"}
    select_device("tpu:3", environment, kinds())
    with pytest.raises(DeviceRefusedError, match="TPU_VISIBLE=3 hides device 1"):
        select_device("tpu:1", environment, kinds())


def test_another_numbering_is_refused() -> None:
    with pytest.raises(DeviceRefusedError, match=r"TPU_MAP=\[0,1\] numbers the devices in another way"):
        select_device("tpu:0", {"TPU_MAP": "[0,1]"}, kinds())


@pytest.mark.parametrize("variable", ["RBLN_DEVICES", "RBLN_DEVICE_MAP", "RBLN_NPUS_PER_DEVICE"])
def test_atoms_other_numberings_are_refused(variable: str) -> None:
    visibility, environment = DEVICE_KINDS["atom"].visibility, {variable: "[0]"}
    assert visibility is not None
    with pytest.raises(DeviceRefusedError, match=rf"{variable}=\[0\] numbers the devices in another way"):
        visibility.narrow(0, environment)
    assert environment == {variable: "[0]"}


@pytest.mark.parametrize(("kind", "variable"), [("atom", "RBLN_VISIBLE_DEVICES"), ("cuda", "CUDA_VISIBLE_DEVICES")])
def test_the_vendors_variable_has_the_physical_number_and_the_binding_the_logical_one(kind: str, variable: str) -> None:
    chosen, address = parse_device(f"{kind}:5")
    environment: dict[str, str] = {}
    assert chosen.visibility is not None
    chosen.visibility.narrow(address.physical, environment)
    assert (environment[variable], address) == ("5", DeviceAddress(kind, 5, 0))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ({"torch": "2.13.0+cpu", "tpu-torch": None}, "tpu-torch 1.2.0 is not installed"),
        ({"torch": "2.12.1", "tpu-torch": "1.2.0"}, "torch is 2.12.1, not 2.13.0"),
        ({"torch": "2.13.0", "tpu-torch": "1.2.1"}, "tpu-torch is 1.2.1, not 1.2.0"),
    ],
)
def test_a_wrong_environment_is_refused_with_the_command_that_makes_the_right_one(
    found: dict[str, str | None], why: str
) -> None:
    environment = Environment("env-tpu", {"torch": "2.13.0", "tpu-torch": "1.2.0"})
    environment.check({"torch": "2.13.0+cpu", "tpu-torch": "1.2.0"}.get)
    with pytest.raises(DeviceRefusedError) as caught:
        environment.check(found.get)
    assert why in str(caught.value)
    assert "make env-tpu" in str(caught.value)
    assert ".venv-tpu/bin/python" in str(caught.value)


def test_a_wrong_environment_touches_nothing() -> None:
    environment: dict[str, str] = {}
    with pytest.raises(DeviceRefusedError, match="tpu-torch 1 is not installed"):
        select_device("tpu:0", environment, kinds(Environment("env-tpu", {"tpu-torch": "1"})))
    assert environment == {}


def probe(code: str, timeout_s: float = 60) -> list[tuple[str, bool, str]]:
    child = "from rowlock.daemon.probe_child import _say; from rowlock.bindings.finding import Finding\n" + code
    return [(item.name, item.ok, item.detail) for item in run_probe([sys.executable, "-c", child], timeout_s)]


def test_what_a_probe_found_before_it_died_is_known() -> None:
    code = "import os, sys\n_say(Finding('driver', True, '1.0'))\nprint('noise')\n"
    code += "print('thread panicked', file=sys.stderr, flush=True)\nos.abort()"
    driver, death = probe(code)
    assert driver == ("driver", True, "1.0")
    assert death[:2] == ("probe", False)
    assert "was ended by SIGABRT after looking at 'driver': thread panicked" in death[2]


def test_a_probe_that_hangs_or_fails_is_a_finding() -> None:
    (hanging,) = probe("import threading\nthreading.Event().wait()", timeout_s=1)
    assert hanging[:2] == ("probe", False)
    assert "did not end within 1 s" in hanging[2]
    (failing,) = probe("raise SystemExit(3)")
    assert "ended with 3: it said nothing" in failing[2]
    assert probe("_say(Finding('x', True, 'y'))") == [("x", True, "y")]


def test_serve_and_doctor_refuse_an_unknown_device(tmp_path: Path) -> None:
    place = {"ROWLOCK_RUNTIME_DIR": str(tmp_path)}
    served = rowlock("serve", "--device", "xpu:0", "--state", tmp_path / "s", **place)
    assert (served.code, "no binding for device 'xpu:0'" in served.err) == (3, True)
    assert not (tmp_path / "s").exists()
    looked = rowlock("doctor", "--device", "xpu:0", "--state", tmp_path / "s", **place)
    assert (looked.code, "no binding for device 'xpu:0'" in looked.out) == (3, True)


def test_rngd_is_its_own_number_and_needs_its_own_environment() -> None:
    """furiosa-torch cannot be shown one card only: the logical number is the physical one."""
    kind, address = parse_device("rngd:3")
    assert address == DeviceAddress("rngd", 3, 3)
    assert kind.environment is not None
    kind.environment.check({"torch": "2.10.0+cu128", "furiosa-torch": "2026.4.0"}.get)
    with pytest.raises(
        DeviceRefusedError, match=r"torch is 2\.13\.0, not 2\.10\.0.*make env-rngd.*\.venv-rngd/bin/python"
    ):
        kind.environment.check({"torch": "2.13.0", "furiosa-torch": None}.get)


@pytest.mark.skipif(installed_version("furiosa-torch") is not None, reason="this is the environment of RNGD")
def test_serve_in_the_wrong_environment_of_rngd_is_refused(tmp_path: Path) -> None:
    served = rowlock(
        "serve",
        "--device",
        "rngd:3",
        "--state",
        tmp_path / "s",
        "--without-hardware",
        ROWLOCK_RUNTIME_DIR=str(tmp_path),
    )
    assert (served.code, "furiosa-torch 2026.4.0 is not installed" in served.err) == (3, True)
    assert "make env-rngd" in served.err
    assert not (tmp_path / "s").exists()
