"""Staging gives way to decoding: fewer threads, and lower priority, while requests run."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

BACKGROUND_NICE: Final = 7
"""Against a decoding thread on one core, a thread of this niceness gets about a sixth of it."""
LOOK_EVERY_S: Final = 0.02


class PacedExecutor(ThreadPoolExecutor):
    """Runs pieces of staging on low-priority threads: all of them when nothing decodes, else one.

    Args:
        threads: at most.
        decoding: whether requests run just now.

    """

    def __init__(self, threads: int, decoding: Callable[[], bool]) -> None:
        super().__init__(threads, "rowlock-hasher", _give_way)
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
        try:
            return fn(*args, **kwargs)
        finally:
            with self._turn:
                self._running -= 1
                self._turn.notify()


def _give_way() -> None:
    """Lower this thread's priority: a Linux thread has its own."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):  # then it runs as it is
        os.setpriority(os.PRIO_PROCESS, thread, max(os.getpriority(os.PRIO_PROCESS, thread), BACKGROUND_NICE))
