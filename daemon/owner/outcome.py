"""How transitions end: reasons, records, and what is tidied up afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from rowlock.bindings.checkpoint.errors import CheckpointError
from rowlock.bindings.device import DeviceError, Runtime
from rowlock.bindings.plan import UndoStore
from rowlock.daemon.owner.chronicle import Chronicle
from rowlock.daemon.owner.core import CancelledError, Core, UnprovenError
from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.retention import keep
from rowlock.daemon.owner.states import TransitionEvent
from rowlock.daemon.owner.target import Target, refusal
from rowlock.journal.journal_file import JournalError
from rowlock.journal.rows import GenerationRow
from rowlock.v1.errors import OwnerError, Reason


def reason_of(error: BaseException) -> Reason:
    """The row of the error table that an exception belongs to."""
    match error:
        case OwnerError():
            return error.reason
        case CheckpointError():
            return refusal(error).reason
        case DeviceError() | UnprovenError():
            return Reason.DEVICE_FAILED
        case JournalError() | OSError():
            return Reason.JOURNAL_FAILED
        case MemoryError():
            return Reason.MEMORY_SHORT
        case CancelledError():
            return Reason.CANCELLED
        case _:
            return Reason.INTERNAL


def is_expected(error: BaseException) -> bool:
    """Whether an exception is a way in which things go wrong, rather than a bug."""
    return reason_of(error) is not Reason.INTERNAL


def conclude(core: Core, chronicle: Chronicle, event: TransitionEvent, outcome: str, cause: BaseException) -> None:
    """End a transition that did not publish; an outcome that cannot be recorded quarantines."""
    message = str(cause) or repr(cause)
    try:
        chronicle.end(event, outcome, reason=reason_of(cause).value, message=message)
    except JournalError as failure:
        core.quarantine(f"the outcome of {chronicle.record.id} cannot be recorded: {failure}")


def publish_quarantine(core: Core, reason: str) -> None:
    core.context.log("owner.quarantined", reason=reason)
    core.quarantine(reason)


def generation_row(record: TransitionRecord, target: Target, previous: int | None, undo: UndoStore) -> GenerationRow:
    identity = target.model.identity
    return GenerationRow(
        generation=record.generation,
        transition_id=record.id,
        previous=previous,
        program=identity.program,
        assets=identity.assets,
        weights=identity.weights,
        checkpoint=target.model.checkpoint,
        overlay=target.overlay,
        level=record.level,
        undo=undo.value,
    )


def keep_target(core: Core, target: Target) -> None:
    """Make durable what an identity needs besides its checkpoint, before it can be published."""
    core.stores.keep(target.model, target.text.assets)
    if target.overlay and target.overlay not in core.stores.pushed.owners():
        if not target.pushed:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"the pushed rows {target.overlay} are not kept any more")
        core.stores.pushed.write(target.overlay, target.pushed)


def become_resident(core: Core, runtime: Runtime, target: Target, generation: int) -> None:
    """Make a durably published target the owner's identity."""
    if core.resident is None or core.resident.runtime is not runtime:
        core.drift = ()
    core.resident = Resident.of(generation, target, runtime)
    core.reason = ""
    core.changed()


def sweep(core: Core) -> None:
    """Delete what no offered rollback, and no restart, needs: undo files, pushed rows, manifests, assets.

    Raises:
        JournalError, OSError: then some are left for the next time.

    """
    journal, stores = core.journal, core.stores
    kept = keep(journal.generations(), journal.current(), journal.undos_cut(), stores.undo.nbytes, stores.retention)
    if kept.cut:
        journal.cut_undos([row.transition_id for row in kept.cut], _cut_text(kept.cut), core.context.clock.now())
    undos = {row.transition_id for row in kept.undos} | {row.id for row in journal.open_transitions()}
    for transition in stores.undo.owners() - undos:
        stores.undo.release(transition)
    for overlay in stores.pushed.owners() - {row.overlay for row in kept.generations}:
        stores.pushed.release(overlay)
    stores.sweep({row.weights for row in kept.generations}, {row.assets for row in kept.generations})


def _cut_text(cut: Sequence[GenerationRow]) -> str:
    return f"the undo of generation {', '.join(str(row.generation) for row in cut)} is let go"
