"""From a device name to its binding. A vendor's package is imported only in its own factory."""

from __future__ import annotations

from rowlock.bindings.device import Binding
from rowlock.daemon.settings import Settings


class UnknownDeviceError(Exception):
    """No binding drives a device of this name."""


def open_binding(settings: Settings) -> Binding:
    """The binding of ``settings.device``, opened.

    Raises:
        UnknownDeviceError: naming what there is.

    """
    if settings.device == "cpu":
        from rowlock.bindings.cpu.binding import CpuBinding  # noqa: PLC0415 - see the module's text

        return CpuBinding(settings.threads, settings.fault_file)
    raise UnknownDeviceError(f"no binding for device {settings.device!r}; this version drives: cpu")
