"""Staging gives way to decoding: one thread, and rests, while requests run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

LOOK_EVERY_S: Final = 0.02
REST: Final = 1.5
"""While requests run, staging rests so many times as long as it worked: what it takes from the memory's and the cores'
time then comes in small pieces."""
REST_MAX_S: Final = 0.03


class PacedExecutor(ThreadPoolExecutor):
    """Runs pieces of staging: on all threads when nothing decodes, else on one, with rests.

    Args:
        threads: at most.
        decoding: whether requests run just now.
        rest: takes seconds.

    """

    def __init__(self, threads: int, decoding: Callable[[], bool], rest: Callable[[float], None] = time.sleep) -> None:
        super().__init__(threads, "rowlock-hasher")
        self._width = threads
        self._decoding = decoding
        self._rest = rest
        self._turn = threading.Condition()
        self._running = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._run, fn, *args, **kwargs)

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            while self._running >= (1 if self._decoding() else self._width):
                self._turn.wait(LOOK_EVERY_S)
            self._running += 1
        start = time.monotonic()
        try:
            return fn(*args, **kwargs)
        finally:
            if self._decoding():
                self._rest(min((time.monotonic() - start) * REST, REST_MAX_S))
            with self._turn:
                self._running -= 1
                self._turn.notify()
