"""B1: close the old runtime, then create the new one.

Everything that can fail without the device fails before the drain::

    stage (read all, digests, programs) -> old can be rebuilt? -> journal ‖ drain
        -> | fence, close old, create new, upload, fence, verify, warm up, publish |

If the new one fails, the old identity is loaded again from its checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rowlock.bindings.device import Runtime
from rowlock.bindings.plan import UndoStore
from rowlock.daemon.owner.core import Steps, UnprovenError
from rowlock.daemon.owner.images import Images
from rowlock.daemon.owner.install import create, install, old_target, prepare, prove_upload, stage_whole, upload, warm
from rowlock.daemon.owner.outcome import become_resident, generation_row, keep_target
from rowlock.daemon.owner.record import RowRange
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.states import TransitionEvent
from rowlock.daemon.owner.target import Target
from rowlock.daemon.owner.transit import Transit
from rowlock.v1.errors import OwnerError, Reason


@dataclass(kw_only=True)
class Reload(Transit):
    """One B1, or the first load."""

    target: Target
    images: Images = field(default_factory=dict)
    runtime: Runtime | None = None
    old_closed: bool = False
    old: Target | None = None

    def prepare(self) -> Steps[None]:
        with self.watch.phase("stage"):
            yield from self.core.on_worker(self._stage)

    def intent(self) -> tuple[str, list[RowRange]]:
        return f"{self.target.model.layout.nbytes} bytes in {len(self.images)} allocations", []

    def _stage(self) -> None:
        core = self.core
        core.journal.reserve_ballast()
        if self.resident is not None and not self.options.allow_irreversible:
            self._prove_rebuildable(self.resident)
        self.images, nonfinite = stage_whole(self.begin_staging(self.target.model.manifest.nbytes), self.target)
        if nonfinite and not self.options.allow_nonfinite:
            raise OwnerError(Reason.NONFINITE, f"{nonfinite} values of the target are NaN or infinite")
        prepare(core, self.target.config, self.target.model.layout, core.context.variants)
        keep_target(core, self.target)
        self.chronicle.stage(f"{self.target.model.manifest.nbytes} bytes read and proved")

    def _prove_rebuildable(self, old: Resident) -> None:
        """The resident identity could be loaded again after its runtime is closed. Raises IRREVERSIBLE.

        Its files stay open until the end: whatever happens to the directory, they can be read.
        """
        try:
            self.old = old_target(self.core, old)
        except OwnerError as error:
            raise OwnerError(Reason.IRREVERSIBLE, f"the resident identity could not be rebuilt: {error}") from error

    def drop_images(self) -> None:
        self.images = {}

    def close(self) -> None:
        super().close()
        if self.old is not None:
            self.old.close()

    def exclude(self) -> None:
        core = self.core
        core.fence_load()
        if self.resident is not None:
            core.resident, core.reason = None, "being replaced"
            core.changed()
            with self.watch.phase("close"):
                core.close_runtime(self.resident.runtime)
            self.old_closed = True
        with self.watch.phase("load"):
            self.runtime = create(core, self.target)
            upload(core, self.runtime, self.images)
        self.chronicle.note(TransitionEvent.WRITES_FENCED, f"reading back {len(self.images)} allocations")
        with self.watch.phase("verify"):
            prove_upload(core, self.runtime, self.images)
        if core.context.warmup:
            with self.watch.phase("warm_up"):
                warm(core, self.runtime, self.target.config, self._given_up)
        self._publish(self.runtime)

    def _given_up(self) -> bool:
        """A first load ends with its owner; a reload is finished, since going back would take as long."""
        return self.resident is None and self.core.is_stopping()

    def _publish(self, runtime: Runtime) -> None:
        record, layout = self.chronicle.record, self.target.model.layout
        current = self.core.journal.current()
        row = generation_row(record, self.target, current.generation if current else None, UndoStore.NONE)
        rows = sum(parent.rows for parent in layout.parents.values())
        with self.watch.phase("publish"):
            self.chronicle.publish(
                row, f"generation {record.generation}", **self.figures(rows_written=rows, bytes_written=layout.nbytes)
            )
        become_resident(self.core, runtime, self.target, record.generation)

    def restore(self, error: Exception) -> None:
        """Close what there is, load the old identity again, and prove it."""
        core, old = self.core, self.resident
        self.drop_images()
        if self.runtime is not None:
            core.close_runtime(self.runtime)
        if old is None:
            self.unload(None, error, "nothing is resident")
        elif not self.options.reload_old:
            self.unload(None, error, "the old identity is not loaded again, by policy")
        else:
            self._load_again(old, error)

    def _load_again(self, old: Resident, error: Exception) -> None:
        core = self.core
        try:
            target = self.old or old_target(core, old)
            self.old = target
            runtime = install(core, target, lambda: False)
        except Exception as failure:
            if core.quarantined:
                raise UnprovenError(core.quarantined) from failure
            self.unload(None, error, f"the old identity could not be loaded again: {failure}")
            return
        core.resident, core.reason, core.drift = Resident.of(old.generation, target, runtime), "", ()
        core.changed()
        self.proved_old("the old identity is loaded again, and proved", error)
