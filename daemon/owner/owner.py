"""The owner thread: the only one that touches the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from rowlock.bindings.device import Binding, DeviceFacts
from rowlock.bindings.plan import Level, Plan, Require
from rowlock.daemon.owner.admission import Admission, new_record, new_transit
from rowlock.daemon.owner.chronicle import Chronicle
from rowlock.daemon.owner.context import Context
from rowlock.daemon.owner.core import CancelledError, Core, Steps
from rowlock.daemon.owner.drift import DriftKeeper, Upkeep
from rowlock.daemon.owner.followers import Followers
from rowlock.daemon.owner.images import Comparer
from rowlock.daemon.owner.jobs import Job, Jobs
from rowlock.daemon.owner.mailbox import Command, Mailbox, Promises
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.outcome import conclude
from rowlock.daemon.owner.planning import Planner
from rowlock.daemon.owner.pushing import PushedRows, target_of_push
from rowlock.daemon.owner.record import Stopwatch, TransitionRecord
from rowlock.daemon.owner.recovery import recover
from rowlock.daemon.owner.requests import GenerationRequest
from rowlock.daemon.owner.scheduler import Scheduler
from rowlock.daemon.owner.scrub import Scrub
from rowlock.daemon.owner.stage import Stager
from rowlock.daemon.owner.states import TERMINAL, TransitionEvent
from rowlock.daemon.owner.stores import Stores
from rowlock.daemon.owner.target import Target, TargetLoader
from rowlock.daemon.owner.verification import Sample, Verification, verify
from rowlock.daemon.owner.view import OwnerView
from rowlock.daemon.owner.watchdog import AbandonedError, Watchdog, WatchedBinding
from rowlock.journal.journal import Journal, JournalError
from rowlock.v1.errors import OwnerError, Reason

STOP_LOOK_S: Final = 0.2


@dataclass
class _Open:
    """The open transition."""

    chronicle: Chronicle
    job: Job | None = None


@dataclass(frozen=True)
class Startup:
    """What a starting owner does.

    Attributes:
        initial: checkpoint of a first start.
        reload: load what was published last; else start EMPTY.
        options: of the first load.

    """

    initial: Path | None = None
    reload: bool = True
    options: Options = field(default_factory=Options)


class Owner:
    """One device, one thread, one model.

    Methods may be called from any thread; those that reach the device return futures.
    ``view`` is read without waiting.
    """

    def __init__(
        self, context: Context, binding: Binding, journal: Journal, stores: Stores, loader: TargetLoader,
        planner: Planner, scheduler: Scheduler, call_timeout_s: float, upkeep: Upkeep | None = None,
    ) -> None:  # fmt: skip
        self.followers = Followers()
        self.journal = journal
        self.planner = planner
        self.failed: BaseException | None = None
        self._context = context
        self._epoch = context.new_id()
        self._open: _Open | None = None
        self._loading = True
        self._mailbox = Mailbox()
        self._promises = Promises()
        self._jobs = Jobs(self._mailbox.wake)
        self._observers: list[Callable[[], None]] = []
        self._watchdog = Watchdog(call_timeout_s, self._abandon)
        self._core = Core(
            context=context,
            binding=WatchedBinding(binding, self._watchdog, context.points),
            journal=journal,
            stores=stores,
            loader=loader,
            stager=Stager(context.hashers),
            comparer=Comparer(context.comparers),
            scheduler=scheduler,
            notify=self.followers.notify,
            changed=self._swap_view,
            launch=self._launch,
            is_open=lambda: self._open is not None,
        )
        self._upkeep = upkeep or Upkeep()
        self._keeper = DriftKeeper(self._core, planner, self._upkeep.policy, self._begin)
        self.view = OwnerView(self._facts(), self._epoch, binding.counters.snapshot(), loading=True)
        self._thread = threading.Thread(target=self._run, name="rowlock-owner", daemon=True)

    # Any thread.

    def observe(self, observer: Callable[[], None]) -> None:
        """Call ``observer`` whenever state, generation or open transition changes."""
        self._observers.append(observer)

    def forget(self, observer: Callable[[], None]) -> None:
        self._observers.remove(observer)

    def start(self, startup: Startup) -> Future[None]:
        """Start the thread. The future is done when a model is resident, or it is known why not."""
        done = self.begin(startup)
        self._watchdog.start()
        self._thread.start()
        return done

    def begin(self, startup: Startup) -> Future[None]:
        """Ask for the start-up, and leave it to the caller to be the owner thread: see :meth:`turn`."""
        return self._ask(lambda promise: self._answer(promise, self._start_up(startup)))

    def generate(self, request: GenerationRequest) -> None:
        """Queue a request; its sink hears of everything that follows."""
        self._mailbox.put(Command(lambda: self._accept(request), request.sink.failed))

    def admit(self, admission: Admission) -> Future[str]:
        """Begin a transition: judged once, here, on the owner thread. The result is its id.

        The future fails with OwnerError (TRANSITION_OPEN, GENERATION_STALE, ETAG_STALE, ...),
        and then the target is closed.
        """

        def action(promise: Future[str]) -> None:
            try:
                steps = self._admit(admission, promise)
            except OwnerError as error:
                admission.close()
                self._promises.fail(promise, error)
            else:
                job = self._jobs.launch(steps)
                if self._open is not None:
                    self._open.job = job

        return self._ask(action, admission.close)

    def cancel(self, transition: str) -> Future[None]:
        """End the open transition before its first write; done when it has been told to."""

        def action(promise: Future[None]) -> None:
            opened = self._open
            if opened is None or opened.chronicle.record.id != transition or opened.job is None:
                self._promises.fail(promise, OwnerError(Reason.NOT_CANCELLABLE, f"{transition} is not open"))
            elif opened.chronicle.state in TERMINAL:
                self._promises.fail(promise, OwnerError(Reason.NOT_CANCELLABLE, f"{transition} has just ended"))
            else:
                self._jobs.cancel(opened.job, CancelledError("cancelled on request"))
                self._promises.keep(promise, None)

        return self._ask(action)

    def verify(self, sample: Sample | None = None) -> Future[Verification]:
        """Read the whole model back, or some of its parents; drift is then heeded."""

        def action(promise: Future[Verification]) -> None:
            if self._open or self._core.quarantined:
                self._promises.fail(promise, self._busy_error())
            else:
                self._answer(promise, self._verify(sample))

        return self._ask(action)

    def target_of_push(self, rows: PushedRows) -> Future[Target]:
        """The target that pushed rows make of the resident model."""

        def action(promise: Future[Target]) -> None:
            if self._open or self._core.quarantined:
                self._promises.fail(promise, self._busy_error())
            else:
                self._answer(promise, target_of_push(self._core, rows, self._context.new_id()))

        return self._ask(action)

    def release_quarantine(self, who: str, why: str) -> None:
        """Record who takes the responsibility; the process has to end then.

        Raises:
            OwnerError: NOT_QUARANTINED, or JOURNAL_FAILED.

        """
        if not self.view.quarantined:
            raise OwnerError(Reason.NOT_QUARANTINED, "the device is not quarantined")
        try:
            self.journal.release_quarantine(who, why, self._context.clock.now())
        except JournalError as error:
            raise OwnerError(Reason.JOURNAL_FAILED, str(error)) from error

    def stop(self) -> None:
        """End: requests are failed, a transition is cancelled before its first write, else finished."""
        self._mailbox.close(OwnerError(Reason.STOPPING, "the daemon is stopping"))
        while self._thread.is_alive() and not self._watchdog.expired:
            self._thread.join(STOP_LOOK_S)
        self._watchdog.close()

    def is_live(self, transition: str) -> bool:
        """Whether the transition still has events to come from this process."""
        return self.view.transition == transition and not self._watchdog.expired

    def _ask(self, action: Callable[[Future[Any]], None], refused: Callable[[], None] = lambda: None) -> Future[Any]:
        promise = self._promises.new()

        def refuse(error: Exception) -> None:
            refused()
            self._promises.fail(promise, error)

        self._mailbox.put(Command(lambda: action(promise), refuse))
        return promise

    # The watchdog's thread.

    def _abandon(self, problem: str) -> None:
        """A device call does not come back: quarantine without touching the device."""
        self._context.log("watchdog.expired", problem=problem)
        self._core.quarantine(problem)
        error = OwnerError(Reason.QUARANTINED, problem)
        self._mailbox.close(error)
        self._promises.fail_all(error)
        for sink in self._core.scheduler.sinks:
            sink.failed(error)
        self.followers.notify_all()

    # The owner thread.

    def _run(self) -> None:
        try:
            while not self._mailbox.closed:
                self.turn()
            self._give_up("the daemon is stopping")
            while self._jobs:
                self.turn()
        except AbandonedError:
            return  # the watchdog has told everybody
        except BaseException as error:  # noqa: BLE001 - the thread's edge: nothing may be served after it
            self.failed = error
            self._context.log("owner.failed", error=repr(error), exc_info=error)
            self._core.quarantine(f"the owner thread failed: {error!r}")
        finally:
            self._end()

    def turn(self) -> None:
        """Commands that came, one step of the scheduler, one step of each job. Waits when there is nothing to do."""
        core = self._core
        resident = None if core.quarantined else core.resident
        idle = not core.scheduler.runnable(resident) and not self._jobs.ready
        command = self._mailbox.take(wait=idle)
        while command is not None:
            command.action()
            command = self._mailbox.take(wait=False)
        if core.quarantined:
            core.scheduler.fail_all(OwnerError(Reason.QUARANTINED, core.quarantined))
        else:
            core.scheduler.step(core.resident)
        self._jobs.step()
        self._swap_view()

    def _launch(self, steps: Steps[None]) -> None:
        self._jobs.launch(steps)

    def _give_up(self, reason: str) -> None:
        """Fail what is waited for, and end the jobs: an exclusive section is never interrupted here."""
        self._core.scheduler.fail_all(OwnerError(Reason.STOPPING, reason))
        self._jobs.cancel_all(CancelledError(reason))

    def _end(self) -> None:
        if self._watchdog.expired:
            return
        error = OwnerError(Reason.STOPPING, "the daemon is stopping")
        if self._core.quarantined:
            error = OwnerError(Reason.QUARANTINED, self._core.quarantined)
        self._mailbox.close(error)
        self._promises.fail_all(error)
        self._core.scheduler.fail_all(error)
        self._open = None
        self._loading = False
        self._swap_view()
        self.followers.notify_all()

    def _answer(self, promise: Future[Any], steps: Steps[Any]) -> None:
        """Run a job whose result, or failure, goes to a promise."""

        def run() -> Steps[None]:
            try:
                result = yield from steps
            except Exception as error:  # noqa: BLE001 - handed to the caller
                self._promises.fail(promise, error)
            else:
                self._promises.keep(promise, result)

        self._jobs.launch(run())

    def _accept(self, request: GenerationRequest) -> None:
        core = self._core
        if core.quarantined:
            request.sink.failed(OwnerError(Reason.QUARANTINED, core.quarantined))
        elif core.resident is None and not self._open and not self._loading:
            request.sink.failed(self._gone_error())
        else:
            try:
                core.scheduler.submit(request)
            except OwnerError as error:
                request.sink.failed(error)

    def _start_up(self, startup: Startup) -> Steps[None]:
        """Recover; on a first start, load the checkpoint that was given."""
        core = self._core
        try:
            yield from recover(core, reload=startup.reload)
            if startup.reload and core.resident is None and not core.quarantined:
                yield from self._offer_another()
            first = core.resident is None and not core.quarantined and self.journal.current() is None
            if first and startup.initial is not None and startup.reload:
                yield from self._first_load(startup.initial, startup.options)
        finally:
            self._loading = False
            self._swap_view()
            if core.resident is None:
                core.scheduler.fail_waiting(self._gone_error())
        if self._upkeep.scrub_share:
            self._launch(Scrub(core, self._keeper, self._upkeep.scrub_share, self._is_idle).run())

    def _offer_another(self) -> Steps[None]:
        """The last published identity could not be loaded: say which earlier one could."""
        core = self._core
        generation = yield from core.on_worker(self.planner.loadable)
        if generation:
            core.reason += f"; generation {generation} can be loaded: rowlock rollback --to {generation}"

    def _first_load(self, initial: Path, options: Options) -> Steps[None]:
        core = self._core
        try:
            plan, target = yield from core.on_worker(self.planner.transition, None, initial, Require.AUTO, options)
        except OwnerError as error:
            core.reason = f"the first checkpoint could not be loaded: {error}"
            raise
        yield from self._admit(Admission("load", plan, target, options), self._promises.new())
        if core.resident is None:
            raise OwnerError(Reason.EMPTY, core.reason)

    def _verify(self, sample: Sample | None) -> Steps[Verification]:
        resident = self._core.resident
        result = yield from verify(self._core, sample)
        assert resident is not None
        self._launch(self._keeper.heed(resident, result.found))
        return result

    def _begin(self, admission: Admission) -> Future[str]:
        """Begin a transition of the owner's own; the future tells its last state. Raises OwnerError."""
        ended: Future[str] = self._promises.new()
        steps = self._admit(admission, self._promises.new())
        opened = self._open
        assert opened is not None

        def run() -> Steps[None]:
            yield from steps
            self._promises.keep(ended, opened.chronicle.state)

        opened.job = self._jobs.launch(run())
        return ended

    def _is_idle(self) -> bool:
        scheduler = self._core.scheduler
        return not (self._open or self._loading or self._core.quarantined or scheduler.active or scheduler.waiting)

    def _busy_error(self) -> OwnerError:
        if self._core.quarantined:
            return OwnerError(Reason.QUARANTINED, self._core.quarantined)
        opened = self._open
        return OwnerError(Reason.TRANSITION_OPEN, f"transition {opened.chronicle.record.id if opened else ''} is open")

    def _gone_error(self) -> OwnerError:
        if self._core.quarantined:
            return OwnerError(Reason.QUARANTINED, self._core.quarantined)
        return OwnerError(Reason.EMPTY, self._core.reason or "nothing is resident")

    def _admit(self, admission: Admission, started: Future[str]) -> Steps[None]:
        """Judge an admission, now; the returned job does the rest."""
        resident = self._core.resident
        if self._open or self._core.quarantined:
            raise self._busy_error()
        if self._loading and admission.kind != "load":
            raise OwnerError(Reason.TRANSITION_OPEN, "the first load is still running")
        if admission.etag and admission.etag != self.view.etag:
            raise OwnerError(Reason.ETAG_STALE, f"etag: {admission.etag} was expected, the owner's is {self.view.etag}")
        generation = resident.generation if resident else 0
        if admission.plan is not None and admission.plan.generation != generation:
            raise OwnerError(
                Reason.GENERATION_STALE,
                f"planned from generation {admission.plan.generation}, resident is {generation or 'nothing'}",
            )
        if admission.plan is None and resident is None:
            raise OwnerError(Reason.EMPTY, "nothing is resident, so there is nothing to unload")
        record = new_record(admission, self._core)
        chronicle = Chronicle(self.journal, self._context.clock, record, self._core.notify)
        self._open = _Open(chronicle)
        self._swap_view()
        return self._transit(admission, chronicle, started)

    def _transit(self, admission: Admission, chronicle: Chronicle, started: Future[str]) -> Steps[None]:
        core, record = self._core, chronicle.record
        watch = Stopwatch(self._context.clock, self._context.points)
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
                yield from new_transit(core, admission, chronicle, watch).run()
        finally:
            self._open = None
            self._swap_view()
            core.notify(record.id)
            if core.resident is None or core.quarantined:
                core.scheduler.fail_waiting(self._gone_error())

    def _end_unopened(self, chronicle: Chronicle, started: Future[str], error: Exception) -> None:
        """Refuse what could not be made durable; should the row be there after all, end it."""
        cancelled = isinstance(error, CancelledError)
        reason = Reason.STOPPING if cancelled else Reason.JOURNAL_FAILED
        self._promises.fail(started, OwnerError(reason, str(error)))
        try:
            there = self.journal.find(chronicle.record.id) is not None
        except JournalError:
            return  # the next admission looks for it again
        if there:
            event = TransitionEvent.CANCELLED if cancelled else TransitionEvent.FAILED
            conclude(self._core, chronicle, event, "nothing was written", error)

    def _open_transition(self, chronicle: Chronicle, request_digest: str) -> None:
        """Make a transition durable; one whose own opening was never settled is ended first."""
        cause = OwnerError(Reason.INTERRUPTED, "whether it had been opened could not be found out")
        for row in self.journal.open_transitions():
            record = TransitionRecord.from_json(row.record)
            stray = Chronicle.resumed(self.journal, self._context.clock, record, self.followers.notify)
            conclude(self._core, stray, TransitionEvent.FAILED, "nothing was written", cause)
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

    def _facts(self) -> DeviceFacts:
        """Of the binding as it is now: what executes can change with the model."""
        facts = self._core.binding.facts
        return replace(facts, test_options=(*facts.test_options, *self._context.test_options))

    def _swap_view(self) -> None:
        core, before = self._core, self.view
        self.view = OwnerView(
            facts=self._facts(),
            epoch=self._epoch,
            counters=core.binding.counters.snapshot(),
            resident=core.resident,
            transition=self._open.chronicle.record.id if self._open else "",
            loading=self._loading,
            quarantined=core.quarantined,
            reason=core.reason,
            leases=core.scheduler.leases,
            requests_waiting=core.scheduler.waiting,
            drift=core.drift if core.resident else (),
            scrubbed=core.scrubbed,
        )
        if (self.view.etag, self.view.drift) != (before.etag, before.drift):
            for observer in list(self._observers):
                observer()
