"""B1: close the old runtime, then create the new one.

Everything that can fail without the device fails before the drain::

    stage (read all, digests) -> old can be rebuilt? -> journal ‖ drain
        -> | fence, close old, create new, upload, fence, verify, publish |

If the new one fails, the old identity is loaded again from its checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rowlock.bindings.device import Counters, DeviceError, Runtime
from rowlock.bindings.plan import Plan, UndoStore
from rowlock.daemon.owner.chronicle import Chronicle
from rowlock.daemon.owner.core import Core, Steps
from rowlock.daemon.owner.images import Images, new_images, resident_mismatch
from rowlock.daemon.owner.outcome import (
    EXPECTED_ERRORS,
    complete_record,
    conclude,
    end_before_writes,
    generation_row,
    keep_target,
    publish,
)
from rowlock.daemon.owner.record import Stopwatch
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.states import TransitionEvent
from rowlock.daemon.owner.target import Target
from rowlock.journal.journal import CommitUnknownError
from rowlock.v1.errors import OwnerError, Reason


@dataclass
class Reload:
    """One B1 (or first load), from the planned record to its end.

    Attributes:
        old: what is resident at the start, or None.

    """

    core: Core
    plan: Plan
    target: Target
    chronicle: Chronicle
    watch: Stopwatch
    old: Resident | None
    allow_irreversible: bool = False
    images: Images = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    exclusive_ms: float = 0.0

    def run(self) -> Steps[None]:
        """All of it; never raises but for broken invariants."""
        core = self.core
        self.counters = core.binding.counters.snapshot()
        blocked = self.watch.mark()
        try:
            try:
                with self.watch.phase("stage"):
                    yield from core.on_worker(self._stage)
                blocked = self.watch.mark()
                core.scheduler.admitting = False
                with self.watch.phase("drain"):
                    yield from core.on_worker(self.chronicle.journal_intent, f"{self.target.model.layout.nbytes} bytes")
                    yield from core.drain()
            except EXPECTED_ERRORS as error:
                end_before_writes(core, self.chronicle, error)
            else:
                self._exclusive()
        finally:
            core.scheduler.admitting = True
            self.target.close()
        self.images = {}
        yield from core.on_worker(
            complete_record, core, self.chronicle, self.watch, self.counters,
            exclusive_ms=self.exclusive_ms, blocked_ms=self.watch.since(blocked),
        )  # fmt: skip

    def _stage(self) -> None:
        if self.old is not None and not self.allow_irreversible:
            prove_rebuildable(self.core, self.old)
        self.images = stage_whole(self.core, self.target)
        keep_target(self.core, self.target)
        self.chronicle.stage(f"{self.target.model.manifest.nbytes} bytes read and proved")

    def _exclusive(self) -> None:
        """The section that excludes inference. Every exit publishes, or loads the old identity again."""
        start = self.watch.mark()
        runtime: Runtime | None = None
        try:
            self.chronicle.note(TransitionEvent.WRITES_BEGAN, "the old runtime is closed first")
            self._close_old()
            with self.watch.phase("load"):
                runtime = self.core.binding.create_runtime(self.target.config, self.target.model.layout)
                upload(self.core, runtime, self.images)
            self.chronicle.note(TransitionEvent.WRITES_FENCED, f"{len(self.images)} allocations to read back")
            with self.watch.phase("verify"):
                prove_upload(self.core, runtime, self.images)
            self._publish(runtime)
        except CommitUnknownError as error:
            self.core.quarantine(f"the publish of {self.chronicle.record.id} has an unknown outcome: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, the old identity comes back
            self._restore(runtime, error)
        self.exclusive_ms = self.watch.since(start)

    def _close_old(self) -> None:
        core = self.core
        core.binding.memory.fence()
        if self.old is None:
            return
        core.resident, core.reason = None, "being replaced"
        core.changed()
        with self.watch.phase("close"):
            self.old.runtime.close()

    def _publish(self, runtime: Runtime) -> None:
        record = self.chronicle.record
        written = self.target.model.layout.nbytes
        rows = sum(parent.rows for parent in self.target.model.layout.parents.values())
        previous = self.old.generation if self.old else None
        with self.watch.phase("publish"):
            self.chronicle.publish(
                generation_row(record, self.target, previous, UndoStore.NONE),
                f"generation {record.generation}",
                rows_written=rows,
                bytes_written=written,
                phases=dict(self.watch.phases),
            )
        publish(self.core, runtime, self.target, record.generation)

    def _restore(self, failed: Runtime | None, error: Exception) -> None:
        """Close what there is, load the old identity again, and prove it."""
        core = self.core
        self.chronicle.note(TransitionEvent.FAILED, str(error))
        core.resident, core.reason = None, str(error)
        try:
            for runtime in (failed, self.old.runtime if self.old else None):
                if runtime is not None:
                    runtime.close()
        except DeviceError as failure:
            core.quarantine(f"{error}; closing the runtime failed: {failure}")
            conclude(core, self.chronicle, TransitionEvent.CLOSE_FAILED, core.quarantined, error)
            return
        if self.old is None:
            conclude(core, self.chronicle, TransitionEvent.RUNTIME_CLOSED, "nothing is resident", error)
            return
        try:
            with self.watch.phase("restore"):
                core.resident = load_again(core, self.old)
        except EXPECTED_ERRORS as failure:
            core.reason = f"{error}; the old identity could not be loaded again: {failure}"
            conclude(core, self.chronicle, TransitionEvent.RUNTIME_CLOSED, core.reason, error)
            return
        core.reason = ""
        core.changed()
        conclude(
            core,
            self.chronicle,
            TransitionEvent.OLD_PROVED,
            "the old identity is loaded again, and proved",
            error,
        )


def stage_whole(core: Core, target: Target) -> Images:
    """Every byte of a target in private memory, each digest checked. Not on the owner thread while it serves."""
    manifest, layout = target.model.manifest, target.model.layout
    images = new_images(layout, layout.parents)
    wanted = {name: range(tensor.info.groups) for name, tensor in manifest.tensors.items()}
    core.stager.stage(target.source, manifest, layout, images, wanted, whole=True)
    return images


def upload(core: Core, runtime: Runtime, images: Images) -> None:
    """Fill every allocation, and fence."""
    for name, image in images.items():
        core.binding.memory.write_rows(runtime.allocations[name], 0, image)
        core.binding.counters.uploads += 1
    core.binding.memory.fence()


def prove_upload(core: Core, runtime: Runtime, images: Images) -> None:
    wrong = resident_mismatch(core.binding.memory, runtime.allocations, images)
    if wrong is not None:
        raise OwnerError(
            Reason.VERIFY_MISMATCH, f"row {wrong[1]} of {wrong[0]} reads back other bytes than were loaded"
        )


def prove_rebuildable(core: Core, old: Resident) -> None:
    """Prove that the resident identity could be loaded again after its runtime is closed.

    Raises:
        OwnerError: IRREVERSIBLE.

    """
    try:
        old_target(core, old).close()
    except OwnerError as error:
        raise OwnerError(Reason.IRREVERSIBLE, f"the resident identity could not be rebuilt: {error}") from error


def old_target(core: Core, old: Resident) -> Target:
    """The old checkpoint as a target, if it still holds program and weights of the old identity."""
    target = core.loader.open(Path(old.model.checkpoint))
    found, wanted = target.model.identity, old.model.identity
    if (found.program, found.weights) != (wanted.program, wanted.weights):
        target.close()
        raise OwnerError(
            Reason.TARGET_CHANGED,
            f"{old.model.checkpoint}: does not hold generation {old.generation} any more",
        )
    return target


def load_again(core: Core, old: Resident) -> Resident:
    """A proved new runtime of an identity that was resident before."""
    target = old_target(core, old)
    try:
        runtime = install(core, target)
    finally:
        target.close()
    return Resident(old.generation, old.model, old.config, old.text, runtime)


def install(core: Core, target: Target) -> Runtime:
    """Stage, create, upload, prove; after an error nothing of it is left."""
    images = stage_whole(core, target)
    runtime = core.binding.create_runtime(target.config, target.model.layout)
    try:
        upload(core, runtime, images)
        prove_upload(core, runtime, images)
    except BaseException:
        runtime.close()
        raise
    return runtime
