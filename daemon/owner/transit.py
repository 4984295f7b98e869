"""What every transition has in common: the bar, and the ways to end before and after it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from rowlock.bindings.device import Counters, Runtime
from rowlock.daemon.owner.chronicle import Chronicle
from rowlock.daemon.owner.core import CancelledError, Core, Steps, UnprovenError
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.outcome import conclude, is_expected, publish_quarantine, sweep
from rowlock.daemon.owner.record import RowRange, Stopwatch, counters_json
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.staging import Staging
from rowlock.daemon.owner.states import TERMINAL, TransitionEvent, TransitionState
from rowlock.daemon.owner.target import Target
from rowlock.journal.journal_file import CommitUnknownError, JournalError


@dataclass
class Transit(ABC):
    """One transition, from its planned record to its end.

    Attributes:
        resident: what is resident at the start, or None.
        target: where it goes; None for an unload.
        staging: where this transition stages, once it does.
        failure: why it did not publish; a failure of what came after that is its ``__cause__``.
        exclusive_ms: measured from the first fence to the end of the exclusive section.

    """

    core: Core
    chronicle: Chronicle
    watch: Stopwatch
    options: Options
    resident: Resident | None
    target: Target | None
    counters: Counters = field(default_factory=Counters)
    exclusive_ms: float = 0.0
    staging: Staging | None = None
    failure: Exception | None = None

    @abstractmethod
    def prepare(self) -> Steps[None]:
        """Everything that can be done while decoding goes on. Ends STAGED, nothing written."""

    @abstractmethod
    def exclude(self) -> None:
        """The section that excludes inference. Publishes, or raises."""

    @abstractmethod
    def restore(self, error: Exception) -> None:
        """Bring back, and prove, what was there before ``exclude`` raised; or unload."""

    @abstractmethod
    def intent(self) -> tuple[str, list[RowRange]]:
        """What is journaled: a message, and the exact rows."""

    def afterwards(self) -> None:  # noqa: B027 - most kinds have nothing left
        """What is left to do once the outcome is recorded and requests go on."""

    def drop_images(self) -> None:  # noqa: B027 - an unload has none
        """Let go of what was staged: it is over. On a worker, since giving much memory back takes its time."""

    def begin_staging(self, nbytes: int) -> Staging:
        """Decide where this transition, with so many bytes to read and prove, is staged. On a worker."""
        self.staging = self.core.context.new_staging(nbytes)
        return self.staging

    def close(self) -> None:
        """Close what was opened for this transition."""
        if self.target is not None:
            self.target.close()

    def run(self) -> Steps[None]:
        """All of it; never raises but for broken invariants of the journal itself."""
        core = self.core
        self.counters = core.binding.counters.snapshot()
        blocked: float | None = None
        try:
            try:
                yield from self._prepare_source()
                yield from self.prepare()
                blocked = self.watch.mark()
                core.scheduler.admitting = False
                yield from self._journal_and_drain()
            except Exception as error:  # noqa: BLE001 - nothing is written yet: whatever it is, it ends here
                self._end_before_writes(error)
            else:
                self._exclusive()
        finally:
            core.writing = False
            core.scheduler.admitting = True
            if core.prefiller is not None:
                core.prefiller.follow(core.resident)
                core.prefiller.discard()
            if core.quarantined:
                core.abandoned.append(self)  # its buffers, and its hold of the checkpoint
            else:
                self.close()
        blocked_ms = self.watch.since(blocked) if blocked is not None else 0.0
        yield from core.on_worker(self._tidy_up)
        yield from core.on_worker(self._complete_record, blocked_ms)
        self.afterwards()

    def _prepare_source(self) -> Steps[None]:
        """Have somebody ready who computes prompts of the target, where that is done elsewhere."""
        prefiller = self.core.prefiller
        if prefiller is not None and self.target is not None and self.resident is not None:
            ready = prefiller.prepare(self.target)
            if ready is not None:
                with self.watch.phase("source"):
                    prefiller.settle((yield from self.core.wait(ready)))

    def _journal_and_drain(self) -> Steps[None]:
        message, ranges = self.intent()
        with self.watch.phase("drain"):
            journaled = self.core.context.workers.submit(self.chronicle.journal_intent, message, ranges)
            if self.core.scheduler.active:
                # Those who follow are told now only if requests still run: else the exclusive section
                # comes at once, and telling them would cost it time on the same cores.
                journaled.add_done_callback(lambda _done: self.core.notify(self.chronicle.record.id))
            try:
                yield from self.core.drain(self.options)
            finally:
                yield from self.core.wait(journaled)

    def _exclusive(self) -> None:
        """Every exit publishes, restores, or quarantines; there is no yield in here."""
        core, start = self.core, self.watch.mark()
        core.writing = True
        core.changed()
        self.chronicle.note(TransitionEvent.WRITES_BEGAN, self.intent()[0])
        failed: Exception | None = None
        try:
            self.exclude()
        except CommitUnknownError as error:
            self.failure = error
            publish_quarantine(core, f"the publish of {self.chronicle.record.id} has an unknown outcome: {error}")
        except UnprovenError as error:
            self.failure = error
            self._quarantine(error, error)
        except Exception as error:  # noqa: BLE001 - whatever it is, what was there before comes back
            self.failure = failed = error
        if failed is not None:
            self._restore(failed)
        self.exclusive_ms = self.watch.since(start)

    def _restore(self, error: Exception) -> None:
        if not is_expected(error):
            self.core.context.log("transition.bug", transition=self.chronicle.record.id, exc_info=error)
        self.chronicle.note(TransitionEvent.FAILED, str(error) or repr(error))
        try:
            with self.watch.phase("restore"):
                self.restore(error)
        except UnprovenError as failure:
            self._quarantine(failure, error)
            error.__cause__ = failure

    def unload(self, runtime: Runtime | None, cause: Exception, problem: str) -> None:
        """Close what is left, and say so. Raises CloseFailedError."""
        core = self.core
        core.resident, core.reason = None, f"{problem}; it began with: {cause}"
        core.changed()
        if runtime is not None:
            core.close_runtime(runtime)
        conclude(core, self.chronicle, TransitionEvent.RUNTIME_CLOSED, problem, cause)

    def proved_old(self, outcome: str, cause: Exception) -> None:
        conclude(self.core, self.chronicle, TransitionEvent.OLD_PROVED, outcome, cause)

    def _quarantine(self, failure: Exception, cause: Exception) -> None:
        publish_quarantine(self.core, str(failure) if failure is cause else f"{cause}; {failure}")
        if self.chronicle.state in {TransitionState.APPLYING, TransitionState.VERIFYING}:
            self.chronicle.note(TransitionEvent.FAILED, str(cause))
        conclude(self.core, self.chronicle, TransitionEvent.CLOSE_FAILED, str(failure), cause)

    def _end_before_writes(self, error: Exception) -> None:
        self.failure = error
        if not is_expected(error):
            self.core.context.log("transition.bug", transition=self.chronicle.record.id, exc_info=error)
        event = TransitionEvent.CANCELLED if isinstance(error, CancelledError) else TransitionEvent.FAILED
        conclude(self.core, self.chronicle, event, "nothing was written", error)

    def _tidy_up(self) -> None:
        if not self.core.quarantined:
            self.drop_images()
        if self.staging is not None:
            self.staging.close()

    def _complete_record(self, blocked_ms: float) -> None:
        """Write down what is known only after the last commit. On a worker: nobody waits for it."""
        if self.chronicle.state not in TERMINAL or self.core.quarantined:
            return
        counters = self.core.binding.counters.since(self.counters)
        try:
            self.chronicle.amend(
                counters=counters_json(counters),
                bytes_read_back=counters.bytes_read_back,
                phases=dict(self.watch.phases),
                drain_ms=self.watch.phases.get("drain", 0.0),
                exclusive_ms=self.exclusive_ms,
                blocked_ms=blocked_ms,
                total_ms=self.watch.total_ms,
            )
            sweep(self.core)
        except (JournalError, OSError) as error:
            self.core.context.log("record.incomplete", transition=self.chronicle.record.id, error=str(error))

    def figures(self, **more: Any) -> dict[str, Any]:
        """What the terminal commit already knows."""
        return {"phases": dict(self.watch.phases), **more}
