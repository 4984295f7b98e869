"""From a device's name to its binding: choosing, refusing, opening."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from rowlock.bindings.address import DeviceAddress
from rowlock.bindings.device import Binding
from rowlock.daemon.device_kinds import DEVICE_KINDS, DeviceKind
from rowlock.daemon.environments import AUTOLOAD_VARIABLE, DeviceRefusedError
from rowlock.daemon.lock import DeviceLock
from rowlock.daemon.settings import Settings


def parse_device(name: str, kinds: Mapping[str, DeviceKind] = DEVICE_KINDS) -> tuple[DeviceKind, DeviceAddress]:
    """The kind and the numbers of a device such as ``cpu`` or ``atom:1``; looks at nothing else.

    Raises:
        DeviceRefusedError: naming what there is.

    """
    prefix, colon, number = name.partition(":")
    kind = kinds.get(prefix)
    if kind is None:
        raise DeviceRefusedError(f"no binding for device {name!r}; this version drives: {', '.join(kinds)}")
    if not kind.numbered:
        if colon:
            raise DeviceRefusedError(f"device {name!r}: there is only one; leave the number out")
        return kind, DeviceAddress(prefix, 0, 0)
    if re.fullmatch(r"0|[1-9][0-9]{0,3}", number) is None:
        raise DeviceRefusedError(f"device {name!r} needs a number, such as {prefix}:0")
    physical = int(number)
    return kind, DeviceAddress(prefix, physical, 0 if kind.visibility else physical)


def select_device(
    name: str,
    environment: MutableMapping[str, str] = os.environ,
    kinds: Mapping[str, DeviceKind] = DEVICE_KINDS,
) -> tuple[DeviceKind, DeviceAddress]:
    """Make this process one that may load the library of a device: the right packages, and one device in sight.

    Comes before the first import of torch: no vendor's package may be loaded unasked with it.

    Raises:
        DeviceRefusedError: unknown, hidden, or in need of another environment.

    """
    kind, address = parse_device(name, kinds)
    if kind.environment is not None:
        kind.environment.check()
    environment[AUTOLOAD_VARIABLE] = "0"
    if kind.visibility is not None:
        kind.visibility.narrow(address.physical, environment)
    return kind, address


def lock_device(name: str) -> DeviceLock:
    """Make this process the one owner of a device.

    Raises:
        DeviceRefusedError: there is no such kind of device.
        DeviceLockedError: it has another owner.

    """
    kind, address = parse_device(name)
    return DeviceLock(name, kind.node_of(address))


def open_binding(settings: Settings) -> Binding:
    """The binding of ``settings.device``, opened.

    Raises:
        DeviceRefusedError: this process cannot drive it.
        DeviceError: it could, but the device does not answer.

    """
    kind, address = select_device(settings.device)
    return kind.open(address, settings)
