"""The owner thread's long jobs: generators that give way between their steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from rowlock.daemon.owner.core import CancelledError, Steps


@dataclass(eq=False)
class Job:
    """A running generator, and what it waits for."""

    steps: Steps[None]
    waits_for: Future[Any] | None = None

    @property
    def ready(self) -> bool:
        return self.waits_for is None or self.waits_for.done()


class Jobs:
    """All running jobs. Owner thread only, but for ``wake``.

    Args:
        wake: called, on any thread, when a job that waited can go on.

    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._jobs: list[Job] = []

    def __bool__(self) -> bool:
        return bool(self._jobs)

    @property
    def ready(self) -> bool:
        return any(job.ready for job in self._jobs)

    def launch(self, steps: Steps[None]) -> Job:
        """Begin a job, up to its first yield: from there on it can be cancelled in good order."""
        job = Job(steps)
        self._jobs.append(job)
        self._advance(job, partial(next, steps))
        return job

    def step(self) -> None:
        """One step of every job that can go on."""
        for job in [item for item in self._jobs if item.ready]:
            self._advance(job, partial(next, job.steps))

    def cancel(self, job: Job, error: CancelledError) -> None:
        """Throw into a job where it stands; it ends at once, or when what it waits for is done."""
        if job in self._jobs:
            self._advance(job, partial(job.steps.throw, error))

    def cancel_all(self, error: CancelledError) -> None:
        for job in list(self._jobs):
            self.cancel(job, error)

    def _advance(self, job: Job, step: Callable[[], Future[Any] | None]) -> None:
        before = job.waits_for
        try:
            job.waits_for = step()
        except (StopIteration, CancelledError):
            self._jobs.remove(job)
            return
        if job.waits_for is not None and job.waits_for is not before:
            job.waits_for.add_done_callback(lambda _done: self._wake())
