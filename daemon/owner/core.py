"""What the owner thread works with, and how its long jobs are written."""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from rowlock.bindings.device import Binding
from rowlock.daemon.owner.context import Context
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.scheduler import Scheduler
from rowlock.daemon.owner.stage import Stager
from rowlock.daemon.owner.stores import Stores
from rowlock.daemon.owner.target import TargetLoader
from rowlock.journal.journal import Journal

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


@dataclass
class Core:
    """Everything that belongs to the owner thread.

    Attributes:
        resident: the published model, or None.
        quarantined: why the device's content cannot be proved, or empty.
        reason: why nothing is resident, or empty.
        changed: publishes a new view; called after any of these three changes.
        notify: tells those who follow a transition that the journal has news.

    """

    context: Context
    binding: Binding
    journal: Journal
    stores: Stores
    loader: TargetLoader
    stager: Stager
    notify: Callable[[str], None]
    changed: Callable[[], None]
    scheduler: Scheduler = field(default_factory=Scheduler)
    resident: Resident | None = None
    quarantined: str = ""
    reason: str = ""

    def quarantine(self, reason: str) -> None:
        """Serve nothing, replace nothing, free nothing: native work may still be running."""
        self.quarantined = self.quarantined or reason
        self.changed()

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

    def drain(self) -> Steps[None]:
        """Let what runs finish. Admission must be closed."""
        assert not self.scheduler.admitting
        while self.scheduler.active:
            yield None
