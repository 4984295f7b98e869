"""Staging gives way to decoding: one thread, in bursts, while requests run; decoding leaves it that one meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

LOOK_EVERY_S: Final = 0.01
BURST_S: Final = 0.1
REST_S: Final = 0.06
"""While requests run, staging works for so long, then leaves all threads to decoding for so long."""


class PacedExecutor(ThreadPoolExecutor):
    """Runs pieces of staging: on all threads when nothing decodes, else on one.

    Two who compute on the same cores cost each other more than they take: whoever waits for
    a thread that was set aside waits for a whole slice of the scheduler's. So decoding asks
    ``wanted``, and keeps off as many cores.

    Args:
        threads: at most.
        decoding: whether requests run just now.
        monotonic: seconds.

    """

    def __init__(
        self, threads: int, decoding: Callable[[], bool], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(threads, "rowlock-hasher")
        self._width = threads
        self._decoding = decoding
        self._monotonic = monotonic
        self._turn = threading.Condition()
        self._running = 0
        self._pieces = 0

    @property
    def wanted(self) -> int:
        """Threads that staging uses just now while requests run: 0 or 1."""
        return 0 if self._resting else min(self._pieces, 1)

    @property
    def _resting(self) -> bool:
        return self._monotonic() % (BURST_S + REST_S) >= BURST_S

    @property
    def _room(self) -> int:
        """Pieces that may run at the same time."""
        if not self._decoding():
            return self._width
        return 0 if self._resting else 1

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        with self._turn:
            self._pieces += 1
        try:
            future = super().submit(self._run, fn, *args, **kwargs)
        except BaseException:
            self._done(None)
            raise
        future.add_done_callback(self._done)
        return future

    def _done(self, _piece: Future[Any] | None) -> None:
        with self._turn:
            self._pieces -= 1

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            while self._running >= self._room:
                self._turn.wait(LOOK_EVERY_S)
            self._running += 1
        try:
            return fn(*args, **kwargs)
        finally:
            with self._turn:
                self._running -= 1
                self._turn.notify()
