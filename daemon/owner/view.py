"""What everybody may read, without waiting: one frozen value, swapped by the owner thread."""

from __future__ import annotations

from dataclasses import dataclass

from rowlock.bindings.device import Counters, DeviceFacts
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.states import OwnerState, owner_state


@dataclass(frozen=True)
class OwnerView:
    """The owner at one moment.

    Attributes:
        resident: what is published, or None.
        transition: id of the open transition, or empty.
        loading: the first load of this process runs.
        quarantined: why the device's content cannot be proved, or empty.
        reason: why nothing is resident, or empty.
        epoch: id of this process.

    """

    facts: DeviceFacts
    epoch: str
    counters: Counters
    resident: Resident | None = None
    transition: str = ""
    loading: bool = False
    quarantined: str = ""
    reason: str = ""
    requests_active: int = 0
    requests_waiting: int = 0

    @property
    def state(self) -> OwnerState:
        return owner_state(
            quarantined=bool(self.quarantined),
            busy=self.loading or bool(self.transition),
            resident=self.resident is not None,
        )
