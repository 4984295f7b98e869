"""Which device of the machine a binding drives, and what this process calls it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceAddress:
    """One device.

    Attributes:
        kind: ``cpu``, ``cuda``, ``rngd`` or ``atom``.
        physical: its number among all devices of this kind on the machine.
        logical: its number for the vendor's library in this process, which may see this device alone.

    """

    kind: str
    physical: int
    logical: int

    @property
    def name(self) -> str:
        """As configured, and as everybody outside of the binding says: by the physical number."""
        return f"{self.kind}:{self.physical}"
