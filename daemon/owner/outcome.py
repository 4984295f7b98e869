"""How transitions end: what all of them share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from blake3 import blake3

from rowlock.bindings.checkpoint.errors import CheckpointError
from rowlock.bindings.device import Allocation, Counters, DeviceError, Runtime
from rowlock.bindings.model.layout import Layout
from rowlock.bindings.plan import UndoStore
from rowlock.daemon.owner.chronicle import Chronicle
from rowlock.daemon.owner.core import CancelledError, Core
from rowlock.daemon.owner.images import Images, new_images, read_slices
from rowlock.daemon.owner.record import RowRange, Stopwatch, TransitionRecord, counters_json
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.states import TERMINAL, TransitionEvent, TransitionState
from rowlock.daemon.owner.stores import UNDO_KEPT
from rowlock.daemon.owner.target import Target, refusal
from rowlock.journal.journal import GenerationRow, JournalError
from rowlock.v1.errors import OwnerError, Reason

EXPECTED_ERRORS: Final = (
    OwnerError,
    CheckpointError,
    DeviceError,
    JournalError,
    OSError,
    MemoryError,
    CancelledError,
)
"""What may go wrong before the first device write. Anything else is a bug."""


def reason_of(error: BaseException) -> Reason:
    """The row of the error table that an exception belongs to."""
    match error:
        case OwnerError():
            return error.reason
        case CheckpointError():
            return refusal(error).reason
        case DeviceError():
            return Reason.DEVICE_FAILED
        case JournalError() | OSError():
            return Reason.JOURNAL_FAILED
        case MemoryError():
            return Reason.MEMORY_SHORT
        case CancelledError():
            return Reason.CANCELLED
        case _:
            return Reason.INTERNAL


def conclude(core: Core, chronicle: Chronicle, event: TransitionEvent, outcome: str, cause: BaseException) -> None:
    """End a transition that did not publish; an outcome that cannot be recorded quarantines."""
    message = str(cause) or type(cause).__name__
    try:
        chronicle.end(event, outcome, reason=reason_of(cause).value, message=message)
    except JournalError as failure:
        core.quarantine(f"the outcome of {chronicle.record.id} cannot be recorded: {failure}")


def end_before_writes(core: Core, chronicle: Chronicle, error: BaseException) -> None:
    """End a transition of which nothing reached the device."""
    event = TransitionEvent.CANCELLED if isinstance(error, CancelledError) else TransitionEvent.FAILED
    if chronicle.record.undo == UndoStore.DURABLE:
        core.stores.undo.remove(chronicle.record.id)
    conclude(core, chronicle, event, "nothing was written", error)


def keep_target(core: Core, target: Target) -> None:
    core.stores.keep(target.model, target.text.assets, target.stamps)


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
        level=record.level,
        undo=undo.value,
    )


def publish(core: Core, runtime: Runtime, target: Target, generation: int) -> None:
    """Make a durably published target the owner's identity."""
    core.resident = Resident(generation, target.model, target.config, target.text, runtime)
    core.reason = ""
    core.changed()


def group_ranges(
    layout: Layout, changed: Mapping[str, Iterable[int]], allocations: Mapping[str, Allocation]
) -> Iterator[RowRange]:
    """The whole groups of an undo, as rows of their parents."""
    for name, groups in changed.items():
        placement = layout.placements[name]
        row_bytes = placement.tensor.row_bytes
        for group in groups:
            first, stop = placement.tensor.group_span(group)
            row = placement.first_row + first
            allocation = allocations[placement.parent].id
            yield RowRange(placement.parent, allocation, row, stop - first, row * row_bytes, (stop - first) * row_bytes)


def unload(
    core: Core, chronicle: Chronicle, resident: Resident, touched: Images, cause: BaseException, problem: str
) -> None:
    """The old bytes cannot be proved: record what is there, then close the model."""
    found = _mixed_digests(core, resident, touched)
    core.resident = None
    core.reason = f"{problem}; it began with: {cause}"
    core.changed()
    try:
        resident.runtime.close()
    except DeviceError as failure:
        core.quarantine(f"{problem}; closing the model failed: {failure}")
        conclude(core, chronicle, TransitionEvent.CLOSE_FAILED, f"{core.quarantined}; {found}", cause)
        return
    conclude(core, chronicle, TransitionEvent.RUNTIME_CLOSED, f"{problem}; {found}", cause)


def _mixed_digests(core: Core, resident: Resident, touched: Images) -> str:
    """Digests of the touched parents as they are now, for the record."""
    images = new_images(resident.model.layout, touched)
    try:
        for _ in read_slices(core.binding.memory, resident.runtime.allocations, images):
            pass
    except DeviceError as failure:
        return f"the mixed bytes could not be read: {failure}"
    return "left behind: " + ", ".join(f"{name}={blake3(data.data).hexdigest()[:16]}" for name, data in images.items())


def complete_record(
    core: Core,
    chronicle: Chronicle,
    watch: Stopwatch,
    before: Counters,
    *,
    exclusive_ms: float,
    blocked_ms: float,
) -> None:
    """Write down what is known only after the last commit. On a worker: nobody waits for it."""
    if chronicle.state not in TERMINAL or core.quarantined:
        return
    counters = core.binding.counters.since(before)
    try:
        chronicle.amend(
            counters=counters_json(counters),
            bytes_read_back=counters.bytes_read_back,
            phases=dict(watch.phases),
            drain_ms=watch.phases.get("drain", 0.0),
            exclusive_ms=exclusive_ms,
            blocked_ms=blocked_ms if "drain" in watch.phases else 0.0,
            total_ms=watch.total_ms,
        )
        if chronicle.state is TransitionState.PUBLISHED:
            for row in core.journal.undo_owners()[UNDO_KEPT:]:
                core.stores.undo.remove(row.transition_id)
    except (JournalError, OSError) as error:
        core.context.log("record.incomplete", transition=chronicle.record.id, error=str(error))
