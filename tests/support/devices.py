"""The devices that the suites run on: `pytest --device NAME`, else the CPU and what else is there.

What a device needs is loaded when it is first opened: one process drives one vendor's device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from rowlock.bindings.cpu.binding import CpuBinding
from rowlock.bindings.device import Binding
from rowlock.daemon.devices import open_binding
from rowlock.daemon.environments import AUTOLOAD_VARIABLE, installed_version
from rowlock.daemon.probing import probe_device
from rowlock.daemon.settings import Settings
from support import standin


def always() -> str:
    return ""


@dataclass(frozen=True)
class DeviceUnderTest:
    """One way to get a binding.

    Attributes:
        open: a fresh binding; the path is a directory for whatever it keeps.
        settings: of a daemon on it.
        environment: further variables of a daemon on it.
        arm: loads what the device needs, and makes armed faults of this file (see bindings/faults.py) hit it; None
            where the binding does that itself.
        write_attempts: how often the vendor's library tries a write before it says that it failed.
        bits_of_cpu: it computes with the very bits of the CPU binding.
        absent: why it cannot be had here, or empty.
        by_default: part of a run that names no device; else only of one that names it.

    """

    open: Callable[[Path], Binding]
    settings: Mapping[str, Any] = field(default_factory=lambda: {"device": "cpu"})
    environment: Callable[[], Mapping[str, str]] = dict
    arm: Callable[[Path], None] | None = None
    write_attempts: int = 1
    bits_of_cpu: bool = True
    absent: Callable[[], str] = always
    by_default: bool = True


CHOSEN_VARIABLE: Final = "ROWLOCK_TEST_DEVICE"
# Not the first one, so that a mixed-up physical and logical number cannot stay unseen.
ATOM: Final = {"device": "atom:1", "without_hardware": True}


def _open_atom(path: Path) -> Binding:
    standin.loaded()
    return _opener(ATOM)(path)


# Of the card, for the suites that run on one; scripts/on-device.sh sets it.
NUMBER: Final = os.environ.get("ROWLOCK_TEST_NUMBER", "0")
CUDA: Final = {"device": f"cuda:{NUMBER}"}
ATOM_CARD: Final = {"device": f"atom:{NUMBER}"}
RNGD_CARD: Final = {"device": f"rngd:{NUMBER}"}
RNGD_CACHE: Final = Path(__file__).resolve().parents[2] / ".cache" / "rngd"
# Without a card any number will do; not the first one, for the same reason as above.
RNGD: Final = {"device": "rngd:1", "without_hardware": True, "programs": RNGD_CACHE / "rowlock" / "programs"}


def _rngd_absent() -> str:
    if installed_version("furiosa-torch") is None:
        return "furiosa-torch is not installed: make env-rngd"
    if os.environ.get(AUTOLOAD_VARIABLE) != "0":
        return f"{AUTOLOAD_VARIABLE} is not 0: torch has loaded furiosa-torch unasked"
    return ""


def _opener(settings: Mapping[str, Any]) -> Callable[[Path], Binding]:
    return lambda path: open_binding(Settings(state=path, socket=path / "unused.sock", **settings))


@cache
def _absent(device: str) -> str:
    """What `doctor` says is missing of a card."""
    return "; ".join(f"{item.name}: {item.detail}" for item in probe_device(device, False) if not item.ok)


DEVICES: Mapping[str, DeviceUnderTest] = {
    "cpu": DeviceUnderTest(lambda _path: CpuBinding(threads=1)),
    # the same, through the seam at which faults are injected
    "cpu-seam": DeviceUnderTest(lambda path: CpuBinding(threads=1, fault_file=path / "no-fault.json")),
    "cuda": DeviceUnderTest(_opener(CUDA), settings=CUDA, bits_of_cpu=False, absent=lambda: _absent(CUDA["device"])),
    # the unmodified torch-rbln over a stand-in for its runtime library: `make test-atom`
    "atom": DeviceUnderTest(
        _open_atom,
        settings=ATOM,
        environment=lambda: standin.environment(standin.build()),
        arm=lambda path: standin.loaded().watch_faults(path),
        write_attempts=2,  # in a batch, and then alone
        absent=lambda: "" if standin.wheel() else "torch-rbln is not installed: make env-atom",
        by_default=False,
    ),
    # the vendor's own runtime library, and a card: scripts/on-device.sh
    "atom-card": DeviceUnderTest(
        _opener(ATOM_CARD),
        settings=ATOM_CARD,
        absent=lambda: _absent(ATOM_CARD["device"]),
        by_default=False,
    ),
    # the vendor's graphs by the vendor's evaluator, without a card: `make test-rngd`
    "rngd": DeviceUnderTest(
        _opener(RNGD),
        settings=RNGD,
        environment=lambda: {"XDG_CACHE_HOME": str(RNGD_CACHE)},
        bits_of_cpu=False,
        absent=_rngd_absent,
        by_default=False,
    ),
    # a card: scripts/on-device.sh
    "rngd-card": DeviceUnderTest(
        _opener(RNGD_CARD),
        settings=RNGD_CARD,
        bits_of_cpu=False,
        absent=lambda: _absent(RNGD_CARD["device"]),
        by_default=False,
    ),
}


def devices_of_run(chosen: str | None) -> list[str]:
    """Names for one run: the one chosen, or all that are part of every run."""
    if chosen is None:
        return [name for name, device in DEVICES.items() if device.by_default]
    assert chosen in DEVICES, f"--device {chosen}: there are {', '.join(DEVICES)}"
    return [chosen]


def device_of_owners() -> DeviceUnderTest:
    """The one that owners of this run use."""
    return DEVICES[os.environ.get(CHOSEN_VARIABLE, "cpu")]
