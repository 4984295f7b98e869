"""Staging gives way to decoding: one thread while requests run, and decoding leaves it that one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

LOOK_EVERY_S: Final = 0.02


class PacedExecutor(ThreadPoolExecutor):
    """Runs pieces of staging: on all threads when nothing decodes, else on one.

    Two who compute on the same cores cost each other more than they take: whoever waits for
    a thread that was set aside waits for a whole slice of the scheduler's. So decoding asks
    ``wanted``, and keeps off as many cores.

    Args:
        threads: at most.
        decoding: whether requests run just now.

    """

    def __init__(self, threads: int, decoding: Callable[[], bool]) -> None:
        super().__init__(threads, "rowlock-hasher")
        self._width = threads
        self._decoding = decoding
        self._turn = threading.Condition()
        self._running = 0
        self._pieces = 0

    @property
    def wanted(self) -> int:
        """Threads that staging has work for while requests run: 0 or 1."""
        return min(self._pieces, 1)

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
            while self._running >= (1 if self._decoding() else self._width):
                self._turn.wait(LOOK_EVERY_S)
            self._running += 1
        try:
            return fn(*args, **kwargs)
        finally:
            with self._turn:
                self._running -= 1
                self._turn.notify()
