"""The owner thread: the only one that touches the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from rowlock.bindings.device import Binding
from rowlock.bindings.plan import Level, Plan, Require
from rowlock.daemon.owner.chronicle import Chronicle
from rowlock.daemon.owner.context import Context
from rowlock.daemon.owner.core import CancelledError, Core, Steps
from rowlock.daemon.owner.in_place import InPlace
from rowlock.daemon.owner.planning import Planner
from rowlock.daemon.owner.record import Stopwatch, TransitionRecord, summarise_plan
from rowlock.daemon.owner.recovery import recover
from rowlock.daemon.owner.reload import Reload
from rowlock.daemon.owner.requests import GenerationRequest
from rowlock.daemon.owner.stage import Stager
from rowlock.daemon.owner.states import TransitionEvent, TransitionState
from rowlock.daemon.owner.stores import Stores
from rowlock.daemon.owner.target import Target, TargetLoader
from rowlock.daemon.owner.verification import Verification, verify
from rowlock.daemon.owner.view import OwnerView
from rowlock.journal.journal import Journal
from rowlock.v1.errors import OwnerError, Reason

COMMANDS_MAX: Final = 1024
"""Commands that may wait for the owner thread; past it callers are refused."""


@dataclass(frozen=True)
class Admission:
    """A planned transition that asks to begin.

    Attributes:
        kind: ``load``, ``transition`` or ``rollback``.
        request_id: the caller's, or empty.
        request_digest: of what the caller asked for, to notice a reused id.

    """

    plan: Plan
    target: Target
    kind: str
    request_id: str = ""
    request_digest: str = ""
    allow_irreversible: bool = False


@dataclass(frozen=True)
class _Command:
    action: Callable[[], None]
    refuse: Callable[[Exception], None]


@dataclass
class _Job:
    """A running generator, and what it waits for."""

    steps: Steps[None]
    waits_for: Future[Any] | None = None

    @property
    def ready(self) -> bool:
        return self.waits_for is None or self.waits_for.done()


@dataclass
class Followers:
    """Who is to be woken when the journal has news of a transition."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _listeners: dict[str, list[Callable[[], None]]] = field(default_factory=dict)

    def add(self, transition: str, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.setdefault(transition, []).append(listener)

    def remove(self, transition: str, listener: Callable[[], None]) -> None:
        with self._lock:
            left = [item for item in self._listeners.get(transition, []) if item is not listener]
            self._listeners[transition] = left
            if not left:
                del self._listeners[transition]

    def notify(self, transition: str) -> None:
        with self._lock:
            listeners = list(self._listeners.get(transition, []))
        for listener in listeners:
            listener()


class Owner:
    """One device, one thread, one model.

    Methods may be called from any thread; those that reach the device return futures.
    ``view`` is read without waiting.
    """

    def __init__(
        self, context: Context, binding: Binding, journal: Journal, stores: Stores, loader: TargetLoader,
        planner: Planner,
    ) -> None:  # fmt: skip
        self.followers = Followers()
        self.journal = journal
        self.planner = planner
        self._context = context
        self._epoch = context.new_id()
        self._transition = ""
        self._loading = True
        self._stopping = False
        self._commands: queue.Queue[_Command] = queue.Queue(COMMANDS_MAX)
        self._jobs: list[_Job] = []
        self._core = Core(
            context=context,
            binding=binding,
            journal=journal,
            stores=stores,
            loader=loader,
            stager=Stager(context.hashers),
            notify=self.followers.notify,
            changed=self._swap_view,
        )
        self.view = OwnerView(binding.facts, self._epoch, binding.counters.snapshot(), loading=True)
        self._thread = threading.Thread(target=self._run, name="rowlock-owner")
        self._observers: list[Callable[[], None]] = []
        self.failed: BaseException | None = None

    # Any thread.

    def observe(self, observer: Callable[[], None]) -> None:
        """Call ``observer`` on the owner thread whenever the view's state changes. Before ``start``."""
        self._observers.append(observer)

    def start(self, initial: Path | None) -> Future[None]:
        """Start the thread. The future is done when a model is resident, or it is known why not."""
        done: Future[None] = Future()
        self._submit(lambda: self._begin(self._start_up(initial), done), done.set_exception)
        self._thread.start()
        return done

    def generate(self, request: GenerationRequest) -> None:
        """Queue a request; its sink hears of everything that follows."""
        self._submit(lambda: self._accept(request), request.sink.failed)

    def admit(self, admission: Admission) -> Future[str]:
        """Begin a transition: judged once, here, on the owner thread. The result is its id.

        The future fails with OwnerError (TRANSITION_OPEN, GENERATION_STALE, ...), and then
        the target is closed.
        """
        done: Future[str] = Future()

        def refuse(error: Exception) -> None:
            admission.target.close()
            done.set_exception(error)

        def action() -> None:
            try:
                steps = self._admit(admission, done)
            except OwnerError as error:
                refuse(error)
                return
            self._launch(steps)

        self._submit(action, refuse)
        return done

    def verify(self) -> Future[Verification]:
        """Read the whole model back."""
        done: Future[Verification] = Future()

        def action() -> None:
            if self._transition or self._core.quarantined:
                done.set_exception(self._busy_error())
            else:
                self._begin(verify(self._core), done)

        self._submit(action, done.set_exception)
        return done

    def stop(self) -> None:
        """End: requests are failed, a transition is cancelled before its first write, else finished."""
        self._submit(self._begin_stop, lambda _: None)
        self._thread.join()

    def is_live(self, transition: str) -> bool:
        """Whether the transition still has events to come from this process."""
        return self.view.transition == transition

    def _submit(self, action: Callable[[], None], refuse: Callable[[Exception], None]) -> None:
        if self._stopping:
            refuse(OwnerError(Reason.STOPPING, "the daemon is stopping"))
            return
        try:
            self._commands.put_nowait(_Command(action, refuse))
        except queue.Full:
            refuse(OwnerError(Reason.QUEUE_FULL, f"{COMMANDS_MAX} commands are waiting already"))

    # The owner thread.

    def _run(self) -> None:
        try:
            while not (self._stopping and not self._jobs):
                self._take_commands()
                self._core.scheduler.step(self._core.resident if not self._core.quarantined else None)
                self._advance_jobs()
                self._swap_view()
        except BaseException as error:  # noqa: BLE001 - the thread's edge: nothing may be served after it
            self.failed = error
            self._core.quarantine(f"the owner thread failed: {error!r}")
            self._context.log("owner.failed", error=repr(error), exc_info=error)
        finally:
            self._stopping = True
            self._refuse_rest()

    def _take_commands(self) -> None:
        """All that wait; blocks only while there is nothing else to do."""
        idle = not self._core.scheduler.runnable(self._core.resident) and not any(job.ready for job in self._jobs)
        try:
            command = self._commands.get(block=idle)
            while True:
                command.action()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _launch(self, steps: Steps[None]) -> None:
        """Begin a job, up to its first yield: from there on it can be cancelled in good order."""
        job = _Job(steps)
        self._jobs.append(job)
        self._advance(job, partial(next, steps))

    def _advance_jobs(self) -> None:
        for job in [item for item in self._jobs if item.ready]:
            self._advance(job, partial(next, job.steps))

    def _advance(self, job: _Job, step: Callable[[], Future[Any] | None]) -> None:
        try:
            job.waits_for = step()
        except (StopIteration, CancelledError):
            self._jobs.remove(job)
            return
        if job.waits_for is not None:
            job.waits_for.add_done_callback(self._wake)

    def _wake(self, _done: Future[Any]) -> None:
        try:
            self._commands.put_nowait(_Command(lambda: None, lambda _: None))
        except queue.Full:
            return  # then the thread is not waiting

    def _begin(self, steps: Steps[Any], done: Future[Any]) -> None:
        """Run a job whose result, or expected failure, goes to a future."""

        def run() -> Steps[None]:
            try:
                result = yield from steps
            except Exception as error:  # noqa: BLE001 - handed to the caller
                done.set_exception(error)
            else:
                done.set_result(result)

        self._launch(run())

    def _accept(self, request: GenerationRequest) -> None:
        if self._core.quarantined:
            request.sink.failed(OwnerError(Reason.QUARANTINED, self._core.quarantined))
        elif self._core.resident is None and not self._transition and not self._loading:
            request.sink.failed(OwnerError(Reason.EMPTY, self._core.reason or "nothing is resident"))
        else:
            try:
                self._core.scheduler.submit(request)
            except OwnerError as error:
                request.sink.failed(error)

    def _start_up(self, initial: Path | None) -> Steps[None]:
        """Recover; on a first start, load the checkpoint that was given."""
        try:
            yield from recover(self._core)
            if self._core.resident is None and self.journal.current() is None and initial is not None:
                yield from self._first_load(initial)
        finally:
            self._loading = False
            self._swap_view()
            if self._core.resident is None:
                self._core.scheduler.fail_waiting(OwnerError(Reason.EMPTY, self._core.reason or "nothing is resident"))

    def _first_load(self, initial: Path) -> Steps[None]:
        try:
            plan, target = yield from self._core.on_worker(self.planner.transition, None, initial, Require.AUTO)
        except OwnerError as error:
            self._core.reason = f"the first checkpoint could not be loaded: {error}"
            raise
        started: Future[str] = Future()
        yield from self._admit(Admission(plan, target, "load"), started)
        if self._core.resident is None:
            raise OwnerError(Reason.EMPTY, self._core.reason)

    def _busy_error(self) -> OwnerError:
        if self._core.quarantined:
            return OwnerError(Reason.QUARANTINED, self._core.quarantined)
        return OwnerError(Reason.TRANSITION_OPEN, f"transition {self._transition} is open")

    def _admit(self, admission: Admission, started: Future[str]) -> Steps[None]:
        """Judge an admission, now; the returned job does the rest."""
        resident = self._core.resident
        if self._transition or self._core.quarantined:
            raise self._busy_error()
        if self._loading and admission.kind != "load":
            raise OwnerError(Reason.TRANSITION_OPEN, "the first load is still running")
        if admission.plan.generation != (resident.generation if resident else 0):
            raise OwnerError(
                Reason.GENERATION_STALE,
                f"planned from generation {admission.plan.generation}, resident is "
                f"{resident.generation if resident else 'nothing'}",
            )
        record = self._new_record(admission)
        self._transition = record.id
        self._swap_view()
        return self._transit(admission, record, started)

    def _transit(self, admission: Admission, record: TransitionRecord, started: Future[str]) -> Steps[None]:
        core, plan, target = self._core, admission.plan, admission.target
        watch = Stopwatch(self._context.clock)
        chronicle = Chronicle(self.journal, self._context.clock, record, core.notify)
        try:
            try:
                yield from core.on_worker(chronicle.open, admission.request_digest)
            except Exception as error:  # noqa: BLE001 - refused: it is not durable
                target.close()
                started.set_exception(OwnerError(Reason.JOURNAL_FAILED, str(error)))
                return
            started.set_result(record.id)
            if plan.level is Level.NOOP:
                target.close()
                yield from core.on_worker(
                    chronicle.end, TransitionEvent.NOTHING_TO_DO, plan.why, total_ms=watch.total_ms
                )
            elif plan.level is Level.B2:
                assert core.resident is not None
                yield from InPlace(core, plan, target, chronicle, watch, core.resident).run()
            else:
                yield from Reload(
                    core, plan, target, chronicle, watch, core.resident, admission.allow_irreversible
                ).run()
        finally:
            self._transition = ""
            self._swap_view()
            core.notify(record.id)
            if core.resident is None or core.quarantined:
                core.scheduler.fail_waiting(self._gone_error())

    def _gone_error(self) -> OwnerError:
        if self._core.quarantined:
            return OwnerError(Reason.QUARANTINED, self._core.quarantined)
        return OwnerError(Reason.EMPTY, self._core.reason or "nothing is resident")

    def _new_record(self, admission: Admission) -> TransitionRecord:
        plan = admission.plan
        return TransitionRecord(
            id=self._context.new_id(),
            request_id=admission.request_id,
            kind=admission.kind,
            level=plan.level.value,
            target=plan.target,
            state=TransitionState.PLANNED.value,
            from_identity=plan.from_identity,
            to_identity=plan.to_identity,
            generation_from=plan.generation,
            created=self._context.clock.now(),
            plan=summarise_plan(plan),
            undo=plan.undo.value,
        )

    def _begin_stop(self) -> None:
        """Fail what is waited for, and end the jobs: an exclusive section is never interrupted here."""
        self._stopping = True
        self._core.scheduler.admitting = False
        self._core.scheduler.fail_all(OwnerError(Reason.STOPPING, "the daemon is stopping"))
        for job in list(self._jobs):
            cancel = partial(job.steps.throw, CancelledError("the daemon is stopping"))
            self._advance(job, cancel)

    def _refuse_rest(self) -> None:
        error = OwnerError(Reason.STOPPING, "the daemon is stopping")
        self._core.scheduler.fail_all(error)
        while True:
            try:
                self._commands.get_nowait().refuse(error)
            except queue.Empty:
                return

    def _swap_view(self) -> None:
        core, before = self._core, self.view.state
        self.view = OwnerView(
            facts=core.binding.facts,
            epoch=self._epoch,
            counters=core.binding.counters.snapshot(),
            resident=core.resident,
            transition=self._transition,
            loading=self._loading,
            quarantined=core.quarantined,
            reason=core.reason,
            requests_active=core.scheduler.active,
            requests_waiting=core.scheduler.waiting,
        )
        if self.view.state is not before:
            for observer in self._observers:
                observer()
