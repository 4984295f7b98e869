"""B2: only the rows that differ are written, in place.

The order is the design. Decoding goes on until the drain; the exclusive section holds
no yield, so nothing else runs on the device from its first line to its last::

    stage -> undo, expected -> undo file -> journal ‖ drain -> | fence apply fence verify publish |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from blake3 import blake3

from rowlock.bindings.device import Allocation, DeviceError, DeviceMemory
from rowlock.bindings.plan import Plan, TargetCheck, UndoStore, Verify
from rowlock.daemon.owner.core import CancelledError, Steps
from rowlock.daemon.owner.digest_readback import drift_of, read_digests
from rowlock.daemon.owner.images import (
    READ_BYTES,
    Images,
    Piece,
    first_mismatch,
    pieces_of,
    read_slices,
    rows_of,
    tensor_bytes,
    whole_parents,
    write_ranges,
)
from rowlock.daemon.owner.outcome import become_resident, generation_row, keep_target
from rowlock.daemon.owner.record import RowRange
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.rows import group_ranges, row_ranges
from rowlock.daemon.owner.staging import Settled, parts_of
from rowlock.daemon.owner.states import TransitionEvent, TransitionState
from rowlock.daemon.owner.target import Target
from rowlock.daemon.owner.transit import Transit
from rowlock.journal.journal_file import JournalError
from rowlock.v1.errors import OwnerError, Reason


@dataclass(kw_only=True)
class InPlace(Transit):
    """One B2.

    Attributes:
        before: what the device held, of each touched parent.
        expected: what it shall hold.
        ranges: the exact rows in which they differ.

    """

    plan: Plan
    resident: Resident
    target: Target
    before: Images = field(default_factory=dict)
    expected: Images = field(default_factory=dict)
    ranges: list[RowRange] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.budget = self.core.step_budget()

    @cached_property
    def changed(self) -> Mapping[str, tuple[int, ...]]:
        """Groups that differ, by tensor."""
        return {change.tensor: change.groups for change in self.plan.changes}

    @cached_property
    def parents(self) -> list[str]:
        """Those with such groups."""
        return sorted({change.parent for change in self.plan.changes})

    @property
    def kept_undo(self) -> UndoStore:
        """What of the undo leads back, once this is published."""
        return self.plan.undo

    @property
    def _undo_in_file(self) -> bool:
        return self.plan.undo is UndoStore.DURABLE

    @property
    def memory(self) -> DeviceMemory:
        return self.core.binding.memory

    @property
    def allocations(self) -> Mapping[str, Allocation]:
        return self.resident.runtime.allocations

    def prepare(self) -> Steps[None]:
        core, watch = self.core, self.watch
        with watch.phase("stage"):
            yield from core.on_worker(self._stage)
        jobs: list[Future[Settled]] = []
        with watch.phase("undo"):
            for parent in self.parents:
                yield from self._read_before(parent)
                jobs += self._settle(parent)
        with watch.phase("expect"):
            yield from core.on_worker(self._gather, jobs)
        if self._undo_in_file:
            with watch.phase("undo_file"):
                yield from core.on_worker(self._write_undo)

    def intent(self) -> tuple[str, list[RowRange]]:
        rows = sum(item.rows for item in self.ranges)
        return f"{rows} rows in {len(self.ranges)} runs, undo {self.plan.undo.value.lower()}", self.ranges

    def _stage(self) -> None:
        core, plan, record = self.core, self.plan, self.chronicle.record
        core.journal.reserve_ballast()
        if self._undo_in_file:
            core.stores.undo.reserve(record.id, plan.bytes_max)
        model = self.target.model
        whole = self.target.whole and plan.target_check is TargetCheck.WHOLE
        read = model.manifest.nbytes if whole else plan.bytes_max
        staging = self.begin_staging(read + (plan.bytes_max if plan.by_digest else plan.parent_bytes))
        self.expected = staging.new_images(model.layout, self.parents, sparse=plan.by_digest)
        self.before = staging.new_images(model.layout, self.parents, sparse=plan.by_digest)
        staging.stage(self.target.source, model.manifest, model.layout, self.expected, self.changed, whole=whole)
        if not plan.by_digest:
            staging.at_hand(self.before)
        keep_target(core, self.target)
        self.chronicle.stage(f"{plan.groups} groups of {len(plan.changes)} tensors read and proved", groups=plan.groups)

    def _read_before(self, parent: str) -> Steps[None]:
        """The parent's image as the device returns it; by digest, only the changed groups of it are kept."""
        if not self.plan.by_digest:
            for _ in read_slices(self.memory, self.allocations[parent], self.before[parent], self.budget):
                yield None
            return
        found = yield from read_digests(self.core, self.resident, [parent])
        drift = drift_of(found, self.resident.model.manifest)
        if drift:
            raise _drifted(drift)
        for piece in pieces_of(self._group_ranges(parent), READ_BYTES):
            allocation = self.allocations[parent]
            self.memory.read_rows(allocation, piece.first_row, rows_of(self.before, piece, self.allocations))
            if self.budget.spend(piece.rows * allocation.parent.row_bytes):
                yield None

    def _settle(self, parent: str) -> list[Future[Settled]]:
        assert self.staging is not None
        parts = parts_of(parent, self.resident.model, self.target.model, self.changed)
        return self.staging.settle(self.before, self.expected, parts, sparse=self.plan.by_digest)

    def _gather(self, jobs: list[Future[Settled]]) -> None:
        """What settling found: refuse drift and new non-finite values; else the exact rows."""
        assert self.staging is not None
        settled = Settled.together(job.result() for job in jobs)
        if settled.drift:
            raise _drifted(settled.drift)
        if settled.nonfinite and not self.options.allow_nonfinite:
            raise OwnerError(
                Reason.NONFINITE, f"{settled.nonfinite} values are NaN or infinite where the resident ones are not"
            )
        self.ranges = row_ranges(settled.runs, self.resident.model.layout, self.allocations)
        if not self.plan.by_digest:
            self.staging.at_hand(self.expected)

    def _write_undo(self) -> None:
        groups = {}
        for name, indices in self.changed.items():
            placement = self.resident.model.layout.placements[name]
            old, row_bytes = tensor_bytes(self.before, placement), placement.tensor.row_bytes
            for group in indices:
                first, stop = placement.tensor.group_span(group)
                groups[name, group] = old[first * row_bytes : stop * row_bytes].data
        self.core.stores.undo.write(self.chronicle.record.id, groups)

    def drop_images(self) -> None:
        self.before = self.expected = {}

    def exclude(self) -> None:
        with self.watch.phase("apply"):
            self.memory.fence()
            write_ranges(self.memory, self.allocations, self.expected, self.ranges)
            self.memory.fence()
        self.chronicle.note(TransitionEvent.WRITES_FENCED, f"{len(self.ranges)} writes; {self._verify_text()}")
        with self.watch.phase("verify"):
            problem = self._verify()
        if problem:
            raise OwnerError(Reason.VERIFY_MISMATCH, f"{problem} reads back other bytes than expected")
        self._publish()

    def afterwards(self) -> None:
        if self.plan.verify is Verify.GROUPS and self.chronicle.state is TransitionState.PUBLISHED:
            self.core.launch(self._scrub())

    def _verify_text(self) -> str:
        what = {
            Verify.PARENTS: f"{len(self.parents)} allocations",
            Verify.GROUPS: f"{self.plan.groups} groups",
            Verify.ALL: "every weight",
        }
        return f"reading back {what[self.plan.verify]}" + (" by digest" if self.plan.by_digest else "")

    def _verify(self) -> str:
        """Which rows do not read back as expected, or empty."""
        piece_bytes = self.core.comparer.piece_bytes
        if self.plan.verify is Verify.GROUPS:
            ranges = [item for parent in self.parents for item in self._group_ranges(parent)]
            problem = self._compare(self.expected, pieces_of(ranges, piece_bytes))
        elif self.plan.by_digest:
            problem = self._digest(self.parents)
        else:
            problem = self._compare(self.expected, whole_parents(self.allocations, self.parents, piece_bytes))
        if not problem and self.plan.verify is Verify.ALL:
            rest = [name for name in self.resident.model.layout.parents if name not in self.expected]
            problem = self._digest(rest)
        return problem

    def _compare(self, images: Images, pieces: Iterator[Piece]) -> str:
        wrong = first_mismatch(self.memory, self.allocations, images, pieces, self.core.comparer)
        return f"row {wrong[1]} of {wrong[0]}" if wrong else ""

    def _digest(self, parents: list[str], *, old: bool = False) -> str:
        found = self.core.run_now(read_digests(self.core, self.resident, parents))
        drift = drift_of(found, (self.resident if old else self.target).model.manifest)
        return f"{drift[0][0]}, rows {drift[0][1]} to {drift[0][1] + drift[0][2] - 1}," if drift else ""

    def _publish(self) -> None:
        record = self.chronicle.record
        row = generation_row(record, self.target, self.resident.generation, self.kept_undo)
        figures = self.figures(
            rows_written=sum(item.rows for item in self.ranges), bytes_written=sum(item.bytes for item in self.ranges)
        )
        with self.watch.phase("publish"):
            self.chronicle.publish(row, f"generation {record.generation}", **figures)
        become_resident(self.core, self.resident.runtime, self.target, record.generation)

    def restore(self, error: Exception) -> None:
        """Write the undo groups, read everything back, and compare."""
        try:
            problem = self._write_back()
        except (DeviceError, MemoryError) as failure:
            problem = f"restoring failed: {failure}"
        if problem:
            self.unload(self.resident.runtime, error, f"{problem}; {self._left_behind()}")
        else:
            self.proved_old("the old bytes are back, and proved", error)

    def _write_back(self) -> str:
        """Restore the old groups, and read the whole model; which rows are not as they were, or empty.

        What went wrong may have reached beyond the touched parents, so those alone prove nothing.
        """
        self.memory.fence()
        for parent in self.parents:
            write_ranges(self.memory, self.allocations, self.before, self._group_ranges(parent))
        self.memory.fence()
        by_image = [] if self.plan.by_digest else self.parents
        problem = self._compare(self.before, whole_parents(self.allocations, by_image, self.core.comparer.piece_bytes))
        if not problem:
            rest = [name for name in self.resident.model.layout.parents if name not in by_image]
            problem = self._digest(rest, old=True)
        return f"{problem} could not be restored" if problem else ""

    def _left_behind(self) -> str:
        """Digests of the touched parents as they are now, for the record."""
        found = []
        try:
            for parent in self.parents:
                hasher = blake3()
                for piece in whole_parents(self.allocations, [parent], READ_BYTES):
                    allocation = self.allocations[parent]
                    data = np.empty(piece.rows * allocation.parent.row_bytes, np.uint8)
                    self.memory.read_rows(allocation, piece.first_row, data)
                    hasher.update(data.data)
                found.append(f"{parent}={hasher.hexdigest()[:16]}")
        except (DeviceError, MemoryError) as failure:
            return f"what is left behind could not be read: {failure}"
        return f"left behind: {', '.join(found)}"

    def _scrub(self) -> Steps[None]:
        """After a publish that read only groups back: read the touched parents, while requests go on.

        What is not as published is drift, and policy says what follows.
        """
        core, resident, parents = self.core, self.core.resident, self.parents
        assert resident is not None
        try:
            found = yield from read_digests(core, resident, parents, serving=True)
            drift = drift_of(found, resident.model.manifest)
            result = f"drift: {drift[0][0]} from row {drift[0][1]} on" if drift else "ok"
            yield from core.heed(resident, found)
        except CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the transition is over; this is recorded
            result = f"ended early: {error}"
        if result != "ok":
            core.context.log("scrub.failed", transition=self.chronicle.record.id, result=result)
        try:
            yield from core.on_worker(self.chronicle.amend, scrub=result)
        except JournalError as error:
            core.context.log("record.incomplete", transition=self.chronicle.record.id, error=str(error))

    def _group_ranges(self, parent: str) -> list[RowRange]:
        layout = self.resident.model.layout
        names = [item.tensor.name for item in layout.in_parent(parent)]
        changed = {name: self.changed[name] for name in names if name in self.changed}
        return group_ranges(changed, layout, self.allocations)


def _drifted(drift: tuple[tuple[str, int, int], ...]) -> OwnerError:
    tensor, first, rows = drift[0]
    more = f", nor are {len(drift) - 1} more groups" if len(drift) > 1 else ""
    return OwnerError(
        Reason.DRIFT,
        f"{tensor}: resident rows {first} to {first + rows - 1} are not those of the published identity{more}",
    )
