"""What the core is given from outside: time, ids, workers."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rowlock.bindings.device import Variant
from rowlock.journal.points import Points

if TYPE_CHECKING:
    from rowlock.daemon.owner.staging import Staging


class Clock(Protocol):
    """Time as an input."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds, for differences only."""
        ...

    def after(self, seconds: float) -> Future[None]:
        """Done once so much time has passed; may be cancelled."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def after(self, seconds: float) -> Future[None]:
        future: Future[None] = Future()
        timer = threading.Timer(seconds, _ring, [future])
        timer.daemon = True
        timer.start()
        return future


def _ring(future: Future[None]) -> None:
    if future.set_running_or_notify_cancel():
        future.set_result(None)


def random_id() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True)
class Context:
    """Injected into everything that needs it.

    Attributes:
        clock: time.
        new_id: makes ids that never repeat.
        workers: run whole jobs (staging, hashing of one model, durable writes).
        hashers: run the small pieces of such jobs; never wait for others, and give way to decoding.
        new_staging: makes one, for one transition that has so many bytes to read and prove; blocks, and is not for the
            owner thread.
        comparers: run the small pieces of exclusive sections; give way to nobody.
        log: takes an event name and its fields.
        points: told of every device effect, and of every phase; the journal and its files have the same.
        variants: shapes that every new runtime is made for.
        warmup: and is run in, before it is published.
        test_options: in force besides those of the binding; empty in production.

    """

    clock: Clock
    new_id: Callable[[], str]
    workers: Executor
    hashers: Executor
    new_staging: Callable[[int], Staging]
    comparers: Executor
    log: Callable[..., None]
    points: Points
    variants: tuple[Variant, ...] = ()
    warmup: bool = False
    test_options: tuple[str, ...] = ()
