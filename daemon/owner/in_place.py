"""B2: only the rows that differ are written, in place.

The order is the design. Decoding goes on until the drain; ``_exclusive`` holds no yield,
so nothing else runs on the device from its first line to its last::

    stage -> undo -> expected -> undo file -> journal ‖ drain -> | fence apply fence verify publish |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rowlock.bindings.device import Counters, DeviceError
from rowlock.bindings.plan import Plan, UndoStore
from rowlock.daemon.owner.chronicle import Chronicle
from rowlock.daemon.owner.core import Core, Steps
from rowlock.daemon.owner.images import (
    Images,
    new_images,
    read_slices,
    resident_mismatch,
    tensor_bytes,
    write_ranges,
)
from rowlock.daemon.owner.outcome import (
    EXPECTED_ERRORS,
    complete_record,
    conclude,
    end_before_writes,
    generation_row,
    group_ranges,
    keep_target,
    publish,
    unload,
)
from rowlock.daemon.owner.record import RowRange, Stopwatch
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.states import TransitionEvent
from rowlock.daemon.owner.target import Target
from rowlock.journal.journal import CommitUnknownError
from rowlock.v1.errors import OwnerError, Reason


@dataclass
class InPlace:
    """One B2, from the planned record to its end."""

    core: Core
    plan: Plan
    target: Target
    chronicle: Chronicle
    watch: Stopwatch
    resident: Resident
    before: Images = field(default_factory=dict)
    expected: Images = field(default_factory=dict)
    ranges: list[RowRange] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)
    exclusive_ms: float = 0.0

    @property
    def changed(self) -> Mapping[str, tuple[int, ...]]:
        return {change.tensor: change.groups for change in self.plan.changes}

    def run(self) -> Steps[None]:
        """All of it; never raises but for broken invariants."""
        core = self.core
        self.counters = core.binding.counters.snapshot()
        blocked = self.watch.mark()
        try:
            try:
                yield from self._prepare()
                blocked = self.watch.mark()
                core.scheduler.admitting = False
                yield from self._journal_and_drain()
            except EXPECTED_ERRORS as error:
                end_before_writes(core, self.chronicle, error)
            else:
                self._exclusive()
        finally:
            core.scheduler.admitting = True
            self.target.close()
        self.expected = self.before = {}
        yield from core.on_worker(
            complete_record, core, self.chronicle, self.watch, self.counters,
            exclusive_ms=self.exclusive_ms, blocked_ms=self.watch.since(blocked),
        )  # fmt: skip

    def _prepare(self) -> Steps[None]:
        """Everything that can be done while decoding goes on."""
        core, watch, layout = self.core, self.watch, self.resident.model.layout
        parents = sorted({change.parent for change in self.plan.changes})
        with watch.phase("stage"):
            self.expected = new_images(layout, parents)
            yield from core.on_worker(self._stage)
        with watch.phase("undo"):
            self.before = new_images(layout, parents)
            for _ in read_slices(core.binding.memory, self.resident.runtime.allocations, self.before):
                yield None
            yield from core.on_worker(self._prove_before)
        with watch.phase("expect"):
            yield from core.on_worker(self._build_expected)
        if self.plan.undo is UndoStore.DURABLE:
            with watch.phase("undo_file"):
                yield from core.on_worker(self._write_undo)

    def _journal_and_drain(self) -> Steps[None]:
        rows = sum(item.rows for item in self.ranges)
        with self.watch.phase("drain"):
            journaled = self.core.context.workers.submit(
                self.chronicle.journal_intent,
                f"{rows} rows in {len(self.ranges)} runs, undo {self.plan.undo.value.lower()}",
                writes=tuple(self.ranges),
                groups=self.plan.groups,
            )
            try:
                yield from self.core.drain()
            finally:
                yield from self.core.wait(journaled)

    def _stage(self) -> None:
        self.core.stager.stage(
            self.target.source,
            self.target.model.manifest,
            self.target.model.layout,
            self.expected,
            self.changed,
            whole=self.target.whole,
        )
        keep_target(self.core, self.target)
        self.chronicle.stage(f"{self.plan.groups} groups of {len(self.plan.changes)} tensors read and proved")

    def _prove_before(self) -> None:
        model = self.resident.model
        wrong = self.core.stager.disagreements(self.before, model.layout, model.manifest)
        if wrong:
            tensor, first, rows = wrong[0]
            raise OwnerError(
                Reason.DRIFT,
                f"{tensor}: resident rows {first} to {first + rows - 1} are not those of the published identity"
                + (f", nor are {len(wrong) - 1} more groups" if len(wrong) > 1 else ""),
            )

    def _build_expected(self) -> None:
        stager, layout, target = self.core.stager, self.resident.model.layout, self.target.model
        stager.complete(self.before, self.expected, layout, self.changed)
        wrong = stager.disagreements(self.expected, layout, target.manifest)
        if wrong:
            raise OwnerError(
                Reason.TARGET_CHANGED, f"{wrong[0][0]}: staged rows from {wrong[0][1]} are not the target's"
            )
        self.ranges = stager.differing_rows(
            self.before, self.expected, layout, self.changed, self.resident.runtime.allocations
        )

    def _write_undo(self) -> None:
        groups = {}
        for name, indices in self.changed.items():
            placement = self.resident.model.layout.placements[name]
            old, row_bytes = tensor_bytes(self.before, placement), placement.tensor.row_bytes
            for group in indices:
                first, stop = placement.tensor.group_span(group)
                groups[name, group] = old[first * row_bytes : stop * row_bytes].data
        self.core.stores.undo.write(self.chronicle.record.id, groups)

    def _exclusive(self) -> None:
        """The section that excludes inference. Every exit publishes, or restores."""
        start = self.watch.mark()
        try:
            self._apply_and_verify()
            self._publish()
        except CommitUnknownError as error:
            self.core.quarantine(f"the publish of {self.chronicle.record.id} has an unknown outcome: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, the old bytes come back
            self._restore(error)
        self.exclusive_ms = self.watch.since(start)

    def _apply_and_verify(self) -> None:
        memory, allocations = self.core.binding.memory, self.resident.runtime.allocations
        self.chronicle.note(TransitionEvent.WRITES_BEGAN, f"{len(self.ranges)} writes")
        with self.watch.phase("apply"):
            memory.fence()
            write_ranges(memory, allocations, self.expected, self.ranges)
            memory.fence()
        self.chronicle.note(TransitionEvent.WRITES_FENCED, f"{len(self.expected)} allocations to read back")
        with self.watch.phase("verify"):
            wrong = resident_mismatch(memory, allocations, self.expected)
        if wrong is not None:
            raise OwnerError(
                Reason.VERIFY_MISMATCH, f"row {wrong[1]} of {wrong[0]} reads back other bytes than expected"
            )

    def _publish(self) -> None:
        record = self.chronicle.record
        row = generation_row(record, self.target, self.resident.generation, self.plan.undo)
        with self.watch.phase("publish"):
            self.chronicle.publish(row, f"generation {record.generation}", **self._figures())
        publish(self.core, self.resident.runtime, self.target, record.generation)

    def _restore(self, error: Exception) -> None:
        """Write the undo groups, read everything touched back, and compare."""
        core, layout = self.core, self.resident.model.layout
        memory, allocations = core.binding.memory, self.resident.runtime.allocations
        self.chronicle.note(TransitionEvent.FAILED, str(error))
        try:
            with self.watch.phase("restore"):
                memory.fence()
                write_ranges(memory, allocations, self.before, group_ranges(layout, self.changed, allocations))
                memory.fence()
                wrong = resident_mismatch(memory, allocations, self.before)
        except DeviceError as failure:
            unload(core, self.chronicle, self.resident, self.before, error, f"restoring failed: {failure}")
            return
        if wrong is not None:
            problem = f"row {wrong[1]} of {wrong[0]} could not be restored"
            unload(core, self.chronicle, self.resident, self.before, error, problem)
            return
        conclude(core, self.chronicle, TransitionEvent.OLD_PROVED, "the old bytes are back, and proved", error)

    def _figures(self) -> dict[str, object]:
        return {
            "rows_written": sum(item.rows for item in self.ranges),
            "bytes_written": sum(item.bytes for item in self.ranges),
            "phases": dict(self.watch.phases),
        }
