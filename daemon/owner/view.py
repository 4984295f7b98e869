"""What everybody may read, without waiting: one frozen value, swapped by the owner thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from blake3 import blake3

from rowlock.bindings.device import CacheUse, Counters, DeviceFacts
from rowlock.daemon.owner.prefilling import SourceView
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.rows import Drift
from rowlock.daemon.owner.scheduler import LeaseHeld, Served
from rowlock.daemon.owner.states import OwnerState, owner_state


@dataclass(frozen=True)
class OwnerView:
    """The owner at one moment.

    Attributes:
        epoch: id of this process.
        resident: what is published, or None.
        transition: id of the open transition, or empty.
        loading: the first load of this process runs.
        quarantined: why the device's content cannot be proved, or empty.
        reason: why nothing is resident, or empty.
        leases: the requests that run.
        tokens: computed for requests since the process started.
        drift: what of the resident model is known to differ from its identity.
        cache: where the K/V of the resident model is.
        served: what was computed since the process started.
        scrubbed: when the scrub last ended a pass, in seconds since the epoch; 0 is never.
        source: who computes prompts elsewhere; None: they are computed here.

    """

    facts: DeviceFacts
    epoch: str
    counters: Counters
    resident: Resident | None = None
    transition: str = ""
    loading: bool = False
    quarantined: str = ""
    reason: str = ""
    leases: tuple[LeaseHeld, ...] = ()
    requests_waiting: int = 0
    tokens: int = 0
    drift: Drift = ()
    scrubbed: float = 0.0
    cache: CacheUse = field(default_factory=CacheUse)
    served: Served = field(default_factory=Served)
    source: SourceView | None = None

    @property
    def state(self) -> OwnerState:
        return owner_state(
            quarantined=bool(self.quarantined),
            busy=self.loading or bool(self.transition),
            resident=self.resident is not None,
        )

    @property
    def serving(self) -> bool:
        """Whether a model answers requests, now or after what a B2 makes them wait for."""
        return self.resident is not None and self.state in {OwnerState.READY, OwnerState.TRANSITIONING}

    @cached_property
    def etag(self) -> str:
        """A short name of the situation: what a mutation may give back as its precondition."""
        generation = self.resident.generation if self.resident else 0
        text = f"{self.epoch}/{generation}/{self.state.value}/{self.transition}"
        return blake3(text.encode()).hexdigest()[:16]
