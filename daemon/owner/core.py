"""What the owner thread works with, and how its long jobs are written."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, TypeVar

from rowlock.bindings.checkpoint.manifest import TensorManifest
from rowlock.bindings.device import Binding, Runtime
from rowlock.daemon.owner.context import Context
from rowlock.daemon.owner.images import Comparer, StepBudget
from rowlock.daemon.owner.options import Drain, Options
from rowlock.daemon.owner.prefilling import Prefiller
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.rows import Drift
from rowlock.daemon.owner.scheduler import Scheduler
from rowlock.daemon.owner.stores import Stores
from rowlock.daemon.owner.target import TargetLoader
from rowlock.journal.journal import Journal
from rowlock.journal.journal_file import JournalError
from rowlock.v1.errors import OwnerError, Reason

OPEN_LOOK_S: Final = 0.05

P = ParamSpec("P")
T = TypeVar("T")

Steps = Generator[Future[Any] | None, None, T]
"""A job of the owner thread. Between two of its steps requests are served.

It yields a future, to be resumed when that is done, or None, to be resumed after the
next step of the scheduler. Code between two yields runs alone: the inference-excluding
lock is that an exclusive section contains no yield.
"""


class CancelledError(Exception):
    """Thrown into a job's steps to end it where it stands."""


class UnprovenError(Exception):
    """Native work may still be live on the device: it is touched no more, and what it may use is kept."""


class CloseFailedError(UnprovenError):
    """A runtime could not be closed. Never tried again."""


class FenceFailedError(UnprovenError):
    """What a load had started may still run."""


@dataclass
class Core:
    """Everything that belongs to the owner thread.

    Attributes:
        notify: tells those who follow a transition that the journal has news.
        changed: publishes a new view; called after any of the fields below it changes.
        launch: runs a further job.
        is_open: whether a transition is open.
        is_stopping: whether the owner has been told to end.
        heed: does what policy wants of what was read back of some tensors of a model.
        prefiller: computes prompts elsewhere; None: they are computed here.
        resident: the published model, or None.
        writing: an exclusive section runs.
        quarantined: why the device's content cannot be proved, or empty.
        reason: why nothing is resident, or empty.
        abandoned: what is kept to the end of a quarantined process: native work may still use it.
        drift: what of the resident model is known to differ from its identity.
        scrubbed: when the scrub last ended a pass, in seconds since the epoch; 0 is never.

    """

    context: Context
    binding: Binding
    journal: Journal
    stores: Stores
    loader: TargetLoader
    comparer: Comparer
    scheduler: Scheduler
    notify: Callable[[str], None]
    changed: Callable[[], None]
    launch: Callable[[Steps[None]], None]
    is_open: Callable[[], bool]
    is_stopping: Callable[[], bool]
    heed: Callable[[Resident, Mapping[str, TensorManifest]], Steps[None]]
    prefiller: Prefiller | None = None
    resident: Resident | None = None
    writing: bool = False
    quarantined: str = ""
    reason: str = ""
    abandoned: list[object] = field(default_factory=list)
    drift: Drift = ()
    scrubbed: float = 0.0

    def quarantine(self, reason: str) -> None:
        """Serve nothing, replace nothing, free nothing: native work may still be running."""
        if self.quarantined:
            return
        self.quarantined = reason
        self.changed()
        try:
            self.journal.record_quarantine(reason, self.context.clock.now())
        except JournalError as error:
            self.context.log("quarantine.not_recorded", reason=reason, error=str(error))

    def absent_error(self) -> OwnerError:
        """What a request is told that no model will answer."""
        if self.quarantined:
            return OwnerError(Reason.QUARANTINED, self.quarantined)
        return OwnerError(Reason.EMPTY, self.reason or "nothing is resident")

    def close_runtime(self, runtime: Runtime) -> None:
        """Close a runtime, once.

        Raises:
            CloseFailedError: what is live on the device is unknown.

        """
        try:
            runtime.close()
        except Exception as error:
            self.abandoned.append(runtime)
            raise CloseFailedError(f"closing the runtime failed: {error}") from error

    def fence_load(self) -> None:
        """Wait for what a load has started. Raises FenceFailedError: the device must not be touched again."""
        try:
            self.binding.memory.fence()
        except Exception as error:
            raise FenceFailedError(f"a fence failed: {error}") from error

    def discard(self, runtime: Runtime, images: object, cause: Exception) -> None:
        """Close what a failed load has left; where that cannot be proved, quarantine, and keep it.

        A failure of the close becomes the ``__cause__`` of the load's own, which stays the one to be reported.
        """
        if isinstance(cause, FenceFailedError):
            self.abandoned.append((runtime, images))
            self.quarantine(str(cause))
            return
        try:
            self.close_runtime(runtime)
        except CloseFailedError as error:
            self.abandoned.append(images)
            self.quarantine(f"{cause}; {error}")
            cause.__cause__ = error

    def withdraw(self, resident: Resident, cause: OwnerError) -> None:
        """Serve a model no more whose bytes are not what they should be: fail its requests, close it.

        No transition may be open.
        """
        assert not self.is_open()
        self.scheduler.fail_all(cause)
        self.resident, self.reason = None, str(cause)
        self.changed()
        try:
            self.close_runtime(resident.runtime)
        except CloseFailedError as error:
            self.quarantine(f"{cause}; {error}")

    def step_budget(self) -> StepBudget:
        """Of a job that uses the device while requests run."""
        return StepBudget(self.context.clock.monotonic, lambda: self.scheduler.decoding)

    def until_closed(self) -> Steps[None]:
        """Wait until no transition is open: its model must not be closed, nor the device given up, under it."""
        while self.is_open():
            yield from self.wait(self.context.clock.after(OPEN_LOOK_S))

    def on_worker(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Steps[T]:
        """Run a job beside the owner thread, and go on with its result."""
        return (yield from self.wait(self.context.workers.submit(job, *args, **kwargs)))

    def wait(self, future: Future[T]) -> Steps[T]:
        """Go on with the result of a future.

        A cancellation meanwhile takes effect only once the future is done: what a worker
        still uses must not be taken away from under it.
        """
        cancelled: CancelledError | None = None
        while not future.done():
            try:
                yield future
            except CancelledError as error:
                cancelled = error
                future.cancel()
        if cancelled is not None:
            raise cancelled
        return future.result()

    def run_now(self, steps: Steps[T]) -> T:
        """All steps of a job at once, without serving: for exclusive sections."""
        try:
            while True:
                future = next(steps)
                if future is not None:
                    concurrent.futures.wait([future])
        except StopIteration as done:
            result: T = done.value
            return result

    def drain(self, options: Options) -> Steps[None]:
        """Let what runs finish, or give way. Admission must be closed.

        Raises:
            CancelledError: the deadline passed.

        """
        assert not self.scheduler.admitting
        if options.drain is Drain.CANCEL:
            self.scheduler.cancel_active(OwnerError(Reason.DRAINED, "cancelled so that a transition can go on"))
        start = self.context.clock.monotonic()
        while self.scheduler.active:
            waited = self.context.clock.monotonic() - start
            if options.drain is Drain.DEADLINE and waited > options.drain_deadline_s:
                raise CancelledError(
                    f"{self.scheduler.active} requests were still running after {options.drain_deadline_s} s"
                )
            yield None
