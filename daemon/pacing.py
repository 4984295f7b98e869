"""Staging gives way to decoding: one thread, and pauses, while requests run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

REST: Final = 3.0
"""While requests run, staging rests so many times as long as it computed: a quarter of one core is its share.

A lower thread priority would do worse: a thread that is set aside while it holds the interpreter's
lock keeps the owner thread waiting for it.
"""
LOOK_EVERY_S: Final = 0.02


class PacedExecutor(ThreadPoolExecutor):
    """Runs pieces of staging: on all threads when nothing decodes, else on one, with rests.

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

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._run, fn, *args, **kwargs)

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            while self._running >= (1 if self._decoding() else self._width):
                self._turn.wait(LOOK_EVERY_S)
            self._running += 1
        start = time.thread_time()
        try:
            return fn(*args, **kwargs)
        finally:
            if self._decoding():
                time.sleep((time.thread_time() - start) * REST)
            with self._turn:
                self._running -= 1
                self._turn.notify()
