"""Transitions of an owner: judged when they ask to begin, carried out, and at most one of them open."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from rowlock.bindings.plan import Level, Plan
from rowlock.daemon.owner.admission import Admission, new_record, new_transit
from rowlock.daemon.owner.chronicle import Chronicle
from rowlock.daemon.owner.core import CancelledError, Core, Steps
from rowlock.daemon.owner.jobs import Job, Jobs
from rowlock.daemon.owner.mailbox import Promises
from rowlock.daemon.owner.outcome import conclude
from rowlock.daemon.owner.record import Stopwatch, TransitionRecord
from rowlock.daemon.owner.states import TERMINAL, TransitionEvent
from rowlock.daemon.owner.view import OwnerView
from rowlock.journal.journal_file import JournalError
from rowlock.v1.errors import OwnerError, Reason


@dataclass
class _Open:
    """The open transition."""

    chronicle: Chronicle
    job: Job | None = None
    failure: Exception | None = None


class Transitions:
    """Owner thread only.

    Args:
        core: the owner's.
        jobs: run what is begun.
        promises: are kept, or failed at the owner's end.
        view: what everybody sees of the owner now.

    """

    def __init__(self, core: Core, jobs: Jobs, promises: Promises, view: Callable[[], OwnerView]) -> None:
        self._core = core
        self._jobs = jobs
        self._promises = promises
        self._view = view
        self._open: _Open | None = None

    @property
    def open_id(self) -> str:
        """The open transition's id, or empty."""
        return self._open.chronicle.record.id if self._open else ""

    def admit(self, admission: Admission, started: Future[str]) -> None:
        """Judge an admission, and begin. ``started`` gets the id once it is durable. Raises OwnerError."""
        job = self._jobs.launch(self._judged(admission, started))
        if self._open is not None:
            self._open.job = job

    def begin(self, admission: Admission) -> Future[str]:
        """Begin a transition of the owner's own; the future tells its last state. Raises OwnerError."""
        ended: Future[str] = self._promises.new()
        steps = self._judged(admission, self._promises.new())
        opened = self._open
        assert opened is not None

        def run() -> Steps[None]:
            yield from steps
            self._promises.keep(ended, opened.chronicle.state)

        opened.job = self._jobs.launch(run())
        return ended

    def within(self, admission: Admission) -> Steps[Exception | None]:
        """All of a transition, as part of a job that runs already; why it did not publish. Raises OwnerError."""
        steps = self._judged(admission, self._promises.new())
        opened = self._open
        assert opened is not None
        yield from steps
        return opened.failure

    def cancel(self, transition: str) -> None:
        """End the open transition before its first write. Raises OwnerError (NOT_CANCELLABLE)."""
        opened = self._open
        if opened is None or opened.chronicle.record.id != transition or opened.job is None:
            raise OwnerError(Reason.NOT_CANCELLABLE, f"{transition} is not open")
        if opened.chronicle.state in TERMINAL:
            raise OwnerError(Reason.NOT_CANCELLABLE, f"{transition} has just ended")
        self._jobs.cancel(opened.job, CancelledError("cancelled on request"))

    def abandon(self) -> None:
        """The owner has ended, and whatever was open with it."""
        self._open = None

    def refuse_busy(self) -> None:
        """Raise OwnerError when a transition is open, or the device is quarantined."""
        if self._core.quarantined:
            raise OwnerError(Reason.QUARANTINED, self._core.quarantined)
        if self._open:
            raise OwnerError(Reason.TRANSITION_OPEN, f"transition {self.open_id} is open")

    def _judged(self, admission: Admission, started: Future[str]) -> Steps[None]:
        """Judge an admission, now; the returned job does the rest."""
        core, view, resident = self._core, self._view(), self._core.resident
        self.refuse_busy()
        if view.loading and admission.kind != "load":
            raise OwnerError(Reason.TRANSITION_OPEN, "the first load is still running")
        if admission.etag and admission.etag != view.etag:
            raise OwnerError(Reason.ETAG_STALE, f"etag: {admission.etag} was expected, the owner's is {view.etag}")
        generation = resident.generation if resident else 0
        if admission.plan is not None and admission.plan.generation != generation:
            raise OwnerError(
                Reason.GENERATION_STALE,
                f"planned from generation {admission.plan.generation}, resident is {generation or 'nothing'}",
            )
        if admission.plan is None and resident is None:
            raise OwnerError(Reason.EMPTY, "nothing is resident, so there is nothing to unload")
        chronicle = Chronicle(core.journal, core.context.clock, new_record(admission, core), core.notify)
        self._open = _Open(chronicle)
        core.changed()
        return self._transit(admission, chronicle, started)

    def _transit(self, admission: Admission, chronicle: Chronicle, started: Future[str]) -> Steps[None]:
        core, record = self._core, chronicle.record
        watch = Stopwatch(core.context.clock, core.context.points)
        try:
            try:
                yield from core.on_worker(self._open_transition, chronicle, admission.request_digest)
            except (JournalError, CancelledError) as error:
                admission.close()
                self._end_unopened(chronicle, started, error)
                return
            self._promises.keep(started, record.id)
            if admission.plan is not None and admission.plan.level is Level.NOOP:
                admission.close()
                yield from self._end_noop(chronicle, admission.plan, watch)
            else:
                transit = new_transit(core, admission, chronicle, watch)
                yield from transit.run()
                if self._open is not None:
                    self._open.failure = transit.failure
        finally:
            self._open = None
            core.changed()
            core.notify(record.id)
            if core.resident is None or core.quarantined:
                core.scheduler.fail_waiting(core.absent_error())

    def _end_unopened(self, chronicle: Chronicle, started: Future[str], error: Exception) -> None:
        """Refuse what could not be made durable; should the row be there after all, end it."""
        cancelled = isinstance(error, CancelledError)
        reason = Reason.STOPPING if cancelled else Reason.JOURNAL_FAILED
        self._promises.fail(started, OwnerError(reason, str(error)))
        try:
            there = self._core.journal.find(chronicle.record.id) is not None
        except JournalError:
            return  # the next admission looks for it again
        if there:
            event = TransitionEvent.CANCELLED if cancelled else TransitionEvent.FAILED
            conclude(self._core, chronicle, event, "nothing was written", error)

    def _open_transition(self, chronicle: Chronicle, request_digest: str) -> None:
        """Make a transition durable; one whose own opening was never settled is ended first."""
        cause = OwnerError(Reason.INTERRUPTED, "whether it had been opened could not be found out")
        core = self._core
        for row in core.journal.open_transitions():
            record = TransitionRecord.from_json(row.record)
            stray = Chronicle.resumed(core.journal, core.context.clock, record, core.notify)
            conclude(core, stray, TransitionEvent.FAILED, "nothing was written", cause)
        chronicle.open(request_digest)

    def _end_noop(self, chronicle: Chronicle, plan: Plan, watch: Stopwatch) -> Steps[None]:
        core = self._core
        try:
            yield from core.on_worker(chronicle.end, TransitionEvent.NOTHING_TO_DO, plan.why, total_ms=watch.total_ms)
        except JournalError as error:
            core.quarantine(f"the outcome of {chronicle.record.id} cannot be recorded: {error}")
        except CancelledError as error:
            if chronicle.state not in TERMINAL:
                conclude(core, chronicle, TransitionEvent.CANCELLED, "nothing was written", error)
