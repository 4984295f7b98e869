"""The owner thread: the only one that touches the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Final

from rowlock.bindings.checkpoint.manifest import TensorManifest
from rowlock.bindings.device import Binding, CacheUse, Counters, DeviceFacts, Variant
from rowlock.daemon.owner.admission import Admission
from rowlock.daemon.owner.context import Context
from rowlock.daemon.owner.core import CancelledError, Core, Steps
from rowlock.daemon.owner.drift import DriftKeeper, Upkeep
from rowlock.daemon.owner.followers import Followers
from rowlock.daemon.owner.images import Comparer
from rowlock.daemon.owner.install import prepare
from rowlock.daemon.owner.jobs import Jobs
from rowlock.daemon.owner.mailbox import Command, Mailbox, Promises
from rowlock.daemon.owner.planning import Planner
from rowlock.daemon.owner.prefilling import Prefiller
from rowlock.daemon.owner.pushing import PushedRows, target_of_push
from rowlock.daemon.owner.requests import GenerationRequest
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.scheduler import Scheduler
from rowlock.daemon.owner.scrub import Scrub
from rowlock.daemon.owner.startup import Startup, start_up
from rowlock.daemon.owner.stores import Stores
from rowlock.daemon.owner.target import Target, TargetLoader
from rowlock.daemon.owner.transitions import Transitions
from rowlock.daemon.owner.verification import Sample, Verification, verify
from rowlock.daemon.owner.view import OwnerView
from rowlock.daemon.owner.warmup import steps_of
from rowlock.daemon.owner.watchdog import AbandonedError, Watchdog, WatchedBinding
from rowlock.journal.journal import Journal
from rowlock.journal.journal_file import JournalError
from rowlock.v1.errors import OwnerError, Reason

STOP_LOOK_S: Final = 0.2


class Owner:
    """One device, one thread, one model.

    Methods may be called from any thread; those that reach the device return futures.
    ``view`` is read without waiting.
    """

    def __init__(
        self, context: Context, binding: Binding, journal: Journal, stores: Stores, loader: TargetLoader,
        planner: Planner, scheduler: Scheduler, call_timeout_s: float, upkeep: Upkeep | None = None,
        new_prefiller: Callable[[Callable[[], None]], Prefiller] | None = None,
    ) -> None:  # fmt: skip
        self.followers = Followers()
        self.journal = journal
        self.planner = planner
        self.failed: BaseException | None = None
        self._context = context
        self._epoch = context.new_id()
        self._loading = True
        self._mailbox = Mailbox()
        self._promises = Promises()
        self._jobs = Jobs(self._mailbox.wake)
        self._observers: list[Callable[[], None]] = []
        self._watchdog = Watchdog(call_timeout_s, self._abandon)
        prefiller = new_prefiller(self._mailbox.wake) if new_prefiller else None
        if prefiller is not None:
            scheduler.compute_prompts_with(prefiller)
        self._core = Core(
            context=context,
            binding=WatchedBinding(binding, self._watchdog, context.points),
            journal=journal,
            stores=stores,
            loader=loader,
            comparer=Comparer(None if binding.facts.host_memory else context.comparers),
            scheduler=scheduler,
            notify=self.followers.notify,
            changed=self._swap_view,
            launch=self._launch,
            is_open=lambda: bool(self._transitions.open_id),
            is_stopping=lambda: self._mailbox.closed,
            heed=self._heed,
            prefiller=prefiller,
        )
        self._upkeep = upkeep or Upkeep()
        self._transitions = Transitions(self._core, self._jobs, self._promises, lambda: self.view)
        self._keeper = DriftKeeper(self._core, planner, self._upkeep.policy, self._transitions.begin)
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
        request.cancelled.heard = self._mailbox.wake
        self._mailbox.put(Command(lambda: self._accept(request), request.sink.failed))

    def admit(self, admission: Admission) -> Future[str]:
        """Begin a transition: judged once, here, on the owner thread. The result is its id.

        The future fails with OwnerError (TRANSITION_OPEN, GENERATION_STALE, ETAG_STALE, ...),
        and then the target is closed.
        """

        def action(promise: Future[str]) -> None:
            try:
                self._transitions.admit(admission, promise)
            except OwnerError:
                admission.close()
                raise

        return self._ask(action, admission.close)

    def cancel(self, transition: str) -> Future[None]:
        """End the open transition before its first write; done when it has been told to."""

        def action(promise: Future[None]) -> None:
            self._transitions.cancel(transition)
            self._promises.keep(promise, None)

        return self._ask(action)

    def verify(self, sample: Sample | None = None) -> Future[Verification]:
        """Read the whole model back, or some of its parents; drift is then heeded."""

        def action(promise: Future[Verification]) -> None:
            self._transitions.refuse_busy()
            self._answer(promise, self._verify(sample))

        return self._ask(action)

    def prepare_variant(self, variant: Variant) -> Future[Counters]:
        """Make the resident model ready for a shape, between the steps of requests; what that cost at the boundary.

        Its programs are made beside the owner thread, where the device has any, then loaded, and run once.
        """

        def action(promise: Future[Counters]) -> None:
            self._transitions.refuse_busy()
            if self._core.resident is None:
                raise OwnerError(Reason.EMPTY, self._core.reason or "nothing is resident")
            self._answer(promise, self._prepare_variant(self._core.resident, variant))

        return self._ask(action)

    def target_of_push(self, rows: PushedRows) -> Future[Target]:
        """The target that pushed rows make of the resident model."""

        def action(promise: Future[Target]) -> None:
            self._transitions.refuse_busy()
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
        self._context.log("owner.stopping")
        while self._thread.is_alive() and not self._watchdog.expired:
            self._thread.join(STOP_LOOK_S)
        self._watchdog.close()

    def is_live(self, transition: str) -> bool:
        """Whether the transition still has events to come from this process."""
        return self.view.transition == transition and not self._watchdog.expired

    def _ask(self, action: Callable[[Future[Any]], None], refused: Callable[[], None] = lambda: None) -> Future[Any]:
        """Have the owner thread do something; an OwnerError that it raises goes to the promise."""
        promise = self._promises.new()

        def act() -> None:
            try:
                action(promise)
            except OwnerError as error:
                self._promises.fail(promise, error)

        def refuse(error: Exception) -> None:
            refused()
            self._promises.fail(promise, error)

        self._mailbox.put(Command(act, refuse))
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
        core, was_open = self._core, not self._mailbox.closed
        resident = None if core.quarantined else core.resident
        idle = not core.scheduler.runnable(resident) and not self._jobs.ready
        command = self._mailbox.take(wait=idle)
        while command is not None:
            command.action()
            command = self._mailbox.take(wait=False)
        if was_open and self._mailbox.closed:
            return  # jobs are told of the end before they take another step
        if core.quarantined:
            core.scheduler.fail_all(OwnerError(Reason.QUARANTINED, core.quarantined), abandon=True)
        else:
            if core.prefiller is not None:
                core.prefiller.follow(core.resident)
            core.scheduler.step(core.resident)
        self._jobs.step()
        self._swap_view()

    def _launch(self, steps: Steps[None]) -> None:
        self._jobs.launch(steps)

    def _give_up(self, reason: str) -> None:
        """Fail what is waited for, and end the jobs: an exclusive section is never interrupted here."""
        self._core.scheduler.fail_all(OwnerError(Reason.STOPPING, reason), abandon=bool(self._core.quarantined))
        self._jobs.cancel_all(CancelledError(reason))

    def _end(self) -> None:
        if self._watchdog.expired:
            return
        error = OwnerError(Reason.STOPPING, "the daemon is stopping")
        if self._core.quarantined:
            error = OwnerError(Reason.QUARANTINED, self._core.quarantined)
        self._mailbox.close(error)
        self._promises.fail_all(error)
        self._core.scheduler.fail_all(error, abandon=bool(self._core.quarantined))
        if self._core.prefiller is not None:
            self._core.prefiller.close()
        self._transitions.abandon()
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
        elif core.resident is None and not self._transitions.open_id and not self._loading:
            request.sink.failed(core.absent_error())
        else:
            try:
                core.scheduler.submit(request)
            except OwnerError as error:
                request.sink.failed(error)

    def _start_up(self, startup: Startup) -> Steps[None]:
        core = self._core
        try:
            yield from start_up(core, self.planner, self._transitions, startup)
        finally:
            self._loading = False
            self._swap_view()
            if core.resident is None:
                core.scheduler.fail_waiting(core.absent_error())
        if self._upkeep.scrub_share:
            self._launch(Scrub(core, self._keeper, self._upkeep.scrub_share, self._is_idle).run())

    def _verify(self, sample: Sample | None) -> Steps[Verification]:
        resident = self._core.resident
        result = yield from verify(self._core, sample)
        assert resident is not None
        self._launch(self._keeper.heed(resident, result.found))
        return result

    def _heed(self, resident: Resident, found: Mapping[str, TensorManifest]) -> Steps[None]:
        return self._keeper.heed(resident, found)

    def _prepare_variant(self, resident: Resident, variant: Variant) -> Steps[Counters]:
        core, layout = self._core, resident.model.layout
        before = core.binding.counters.snapshot()
        yield from core.on_worker(prepare, core, resident.config, layout, (variant,))
        self._refuse_moved(resident)
        resident.runtime.add_variant(variant)
        for _ in steps_of(resident.runtime, resident.config, variant):
            yield None
            self._refuse_moved(resident)
        core.changed()
        return core.binding.counters.since(before)

    def _refuse_moved(self, resident: Resident) -> None:
        """Raise OwnerError: TRANSITION_OPEN, where this is not the resident model any more, or is about to be none."""
        if self._core.resident is not resident or self._transitions.open_id:
            raise OwnerError(Reason.TRANSITION_OPEN, "a transition has begun meanwhile: prepare it again")

    def _is_idle(self) -> bool:
        scheduler = self._core.scheduler
        return not (
            self._transitions.open_id
            or self._loading
            or self._core.quarantined
            or scheduler.active
            or scheduler.waiting
        )

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
            transition=self._transitions.open_id,
            loading=self._loading,
            quarantined=core.quarantined,
            reason=core.reason,
            leases=core.scheduler.leases,
            requests_waiting=core.scheduler.waiting,
            tokens=core.scheduler.served.tokens,
            drift=core.drift if core.resident else (),
            scrubbed=core.scrubbed,
            cache=core.resident.runtime.cache if core.resident else CacheUse(),
            served=core.scheduler.served,
            source=core.prefiller.view if core.prefiller else None,
        )
        if (self.view.etag, self.view.drift) != (before.etag, before.drift):
            for observer in list(self._observers):
                observer()
