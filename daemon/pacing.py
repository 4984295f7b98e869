"""Staging gives way to decoding: while requests run, one thread works, and only so much in each step of theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, Protocol

LOOK_EVERY_S: Final = 0.02
STEP_LOOK_S: Final = 0.003
STEP_SHARE_S: Final = 0.003
"""Seconds of staging in one step of decoding. A piece that was begun is finished."""
LULL_S: Final = 0.1
"""How long after a step others are expected: clients that got their last token together ask again together."""
NEXT_S: Final = 0.03
"""Within which such clients have asked again."""
STEP_WAIT_S: Final = 0.25
"""How long staging waits for a step to end: one that takes longer is of a size that staging cannot hurt."""


class Decoder(Protocol):
    """What staging gives way to.

    Attributes:
        decoding: whether steps are taken just now.
        steps: taken so far.
        stepped: when the last was taken, in monotonic seconds.

    """

    @property
    def decoding(self) -> bool: ...

    @property
    def steps(self) -> int: ...

    @property
    def stepped(self) -> float: ...


class PacedExecutor(ThreadPoolExecutor):
    """Runs pieces of staging: on all threads when nothing decodes, else a few on one thread in every step.

    Args:
        threads: at most.
        decoder: read from any thread.
        rest: takes seconds.

    """

    def __init__(self, threads: int, decoder: Decoder, rest: Callable[[float], None] = time.sleep) -> None:
        super().__init__(threads, "rowlock-hasher")
        self._width = threads
        self._decoder = decoder
        self._rest = rest
        self._turn = threading.Condition()
        self._running = 0
        self._step = -1
        self._spent_s = 0.0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._run, fn, *args, **kwargs)

    def give_way(self) -> None:
        """Let a step of decoding end first, if there is one: for work that is done elsewhere in pieces of some ms."""
        self._await_step_after(self._decoder.steps)

    def decoding_goes_on(self) -> bool:
        """Whether requests run, or follow so closely that the next is here in a moment; blocks for that moment."""
        until = self._decoder.stepped + NEXT_S
        while not self._decoder.decoding and time.monotonic() < until:
            self._rest(STEP_LOOK_S)
        return self._decoder.decoding

    def _run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            while self._running >= (1 if self._beside_decoding() else self._width):
                self._turn.wait(LOOK_EVERY_S)
            self._running += 1
        start = time.monotonic()
        try:
            return fn(*args, **kwargs)
        finally:
            if self._beside_decoding():
                self._account(time.monotonic() - start)
            with self._turn:
                self._running -= 1
                self._turn.notify()

    def _beside_decoding(self) -> bool:
        return self._decoder.decoding or time.monotonic() - self._decoder.stepped < LULL_S

    def _account(self, seconds: float) -> None:
        """Count what was spent in this step; when it is enough, wait for the next.

        Beside decoding one thread is here at a time.
        """
        if self._decoder.steps != self._step:
            self._step, self._spent_s = self._decoder.steps, 0.0
        self._spent_s += seconds
        if self._spent_s >= STEP_SHARE_S:
            self._await_step_after(self._step)

    def _await_step_after(self, step: int) -> None:
        waited = 0.0
        while self._decoder.decoding and self._decoder.steps == step and waited < STEP_WAIT_S:
            self._rest(STEP_LOOK_S)
            waited += STEP_LOOK_S
