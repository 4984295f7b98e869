"""The devices that the suites run on: `pytest --device NAME`, else the CPU and what else is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rowlock.bindings.cpu.binding import CpuBinding
from rowlock.bindings.device import Binding


def always() -> str:
    return ""


@dataclass(frozen=True)
class DeviceUnderTest:
    """One way to get a binding.

    Attributes:
        open: a fresh binding; the path is a directory for whatever it keeps.
        absent: why it cannot be had here, or empty.
        by_default: part of a run that names no device; else only of one that names it.

    """

    open: Callable[[Path], Binding]
    absent: Callable[[], str] = always
    by_default: bool = True


DEVICES: Mapping[str, DeviceUnderTest] = {
    "cpu": DeviceUnderTest(lambda _path: CpuBinding(threads=1)),
    # the same, through the seam at which faults are injected
    "cpu-seam": DeviceUnderTest(lambda path: CpuBinding(threads=1, fault_file=path / "no-fault.json")),
}


def devices_of_run(chosen: str | None) -> list[str]:
    """Names for one run: the one chosen, or all that are part of every run."""
    if chosen is None:
        return [name for name, device in DEVICES.items() if device.by_default]
    assert chosen in DEVICES, f"--device {chosen}: there are {', '.join(DEVICES)}"
    return [chosen]
