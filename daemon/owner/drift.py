"""Drift: resident bytes that are not those of the published identity, and what is done about it.

Found by a verification, by the scrub, or after a publish that read only groups back. It is always reported: in the
owner's view, in the log, and as a signed event of the journal. Then, by policy::

    repair       a transition to the identity that should be there; if it cannot be had, the
                 model is withdrawn: nothing is served that is not what it says it is
    report       the owner goes on as it is, and says so
    quarantine   nothing is served, nothing is replaced
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum

from rowlock.bindings.checkpoint.manifest import Manifest, TensorManifest
from rowlock.bindings.plan import Model
from rowlock.daemon.owner.admission import Admission
from rowlock.daemon.owner.core import CancelledError, Core, Steps
from rowlock.daemon.owner.digest_readback import drift_of, read_digests
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.outcome import reason_of
from rowlock.daemon.owner.planning import Planner
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.rows import Drift
from rowlock.daemon.owner.states import TransitionState
from rowlock.journal.journal_file import JournalError
from rowlock.v1.errors import OwnerError, Reason

NAMED_MAX = 20
"""Groups that one report names."""


class DriftPolicy(StrEnum):
    """What follows when drift is found; see the module's text."""

    REPORT = "REPORT"
    REPAIR = "REPAIR"
    QUARANTINE = "QUARANTINE"


@dataclass(frozen=True)
class Upkeep:
    """How an owner looks after its resident model.

    Attributes:
        policy: what follows when drift is found.
        scrub_share: share of time that reading the model back may take while the owner is idle; 0 is never.

    """

    policy: DriftPolicy = DriftPolicy.REPAIR
    scrub_share: float = 0.0


@dataclass(frozen=True)
class DriftKeeper:
    """Heeds drift. Owner thread only.

    Attributes:
        begin: begins a transition of the owner's own; the future tells its last state. Raises OwnerError.

    """

    core: Core
    planner: Planner
    policy: DriftPolicy
    begin: Callable[[Admission], Future[str]]

    def heed(self, resident: Resident, found: Mapping[str, TensorManifest]) -> Steps[None]:
        """Report what was read back of some tensors, and act on it. Does nothing when another model is resident.

        Args:
            resident: whose tensors.
            found: their digests as they were read back; whole parents.

        """
        core = self.core
        if core.resident is not resident or core.quarantined:
            return
        drift = drift_of(found, resident.model.manifest)
        known = core.drift
        core.drift = (*(item for item in known if item[0] not in found), *drift)
        core.changed()
        if not drift:
            return
        text = drift_text(drift)
        if core.drift != known:
            yield from self._report(resident, text)
        if self.policy is not DriftPolicy.REPORT:
            yield from core.until_closed()
        if core.resident is not resident or core.quarantined:
            return
        if self.policy is DriftPolicy.QUARANTINE:
            core.quarantine(f"drift: {text}")
        elif self.policy is DriftPolicy.REPAIR:
            yield from self._repair(resident, found, text)

    def confirm(self, resident: Resident, parent: str) -> Steps[None]:
        """Read a parent in which something differed once more, whole, and heed what is there."""
        found = yield from read_digests(self.core, resident, [parent], serving=True)
        if not drift_of(found, resident.model.manifest):
            self.core.context.log("drift.not_confirmed", parent=parent)
        yield from self.heed(resident, found)

    def _report(self, resident: Resident, text: str) -> Steps[None]:
        core = self.core
        core.context.log("drift.found", generation=resident.generation, drift=text, policy=self.policy.value)
        message = f"generation {resident.generation}: {text}"
        try:
            yield from core.on_worker(core.journal.record_drift, message, core.context.clock.now())
        except JournalError as error:
            core.context.log("drift.not_recorded", error=str(error))

    def _repair(self, resident: Resident, found: Mapping[str, TensorManifest], text: str) -> Steps[None]:
        core, drifted = self.core, drifted_model(resident.model, found)
        try:
            plan, target = yield from core.on_worker(self.planner.repair, resident, drifted, Options())
            admission = Admission("repair", plan, target, Options(), drifted=drifted)
            ended = yield from core.wait(self._begin(admission))
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the drifted model is not served on
            if reason_of(error) is Reason.TRANSITION_OPEN:
                return  # it will be found again
            ended, text = reason_of(error).value, f"{text}; it cannot be repaired: {error}"
        if ended not in {TransitionState.PUBLISHED, TransitionState.CANCELLED}:
            yield from core.until_closed()
            if core.resident is resident:
                core.withdraw(resident, OwnerError(Reason.DRIFT, f"drift: {text}"))

    def _begin(self, admission: Admission) -> Future[str]:
        try:
            return self.begin(admission)
        except OwnerError:
            admission.close()
            raise


def drifted_model(model: Model, found: Mapping[str, TensorManifest]) -> Model:
    """The model that is really there: its manifest is what was read back."""
    manifest = Manifest.of({**model.manifest.tensors, **found}.values())
    return replace(model, manifest=manifest, identity=replace(model.identity, weights=manifest.root))


def drift_text(drift: Drift) -> str:
    """Tensors and rows, for a person."""
    named = [f"{tensor} within rows {first} to {first + rows - 1}" for tensor, first, rows in drift[:NAMED_MAX]]
    more = f" and {len(drift) - NAMED_MAX} more groups" if len(drift) > NAMED_MAX else ""
    return ", ".join(named) + more
