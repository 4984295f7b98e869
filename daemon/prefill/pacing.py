"""A source that takes as long as it is told to: benchmarks only.

It stands for a device that computes beside the owner instead of on the owner's cores. The first prompt of each length
is really computed; for each later one that K/V is announced again from memory, each block when computing it would have
come to its end: late wake-ups do not add up. So what is answered means nothing; how it is moved is real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import replace

from rowlock.daemon.prefill.engine import Block, Engine, States, Work
from rowlock.daemon.prefill.protocol.hello import SourceFacts


class PacedEngine:
    """An engine that repeats, at a given pace, what another one computed for a prompt of the same length.

    Args:
        inner: computes the first prompt of each length.
        layer_s: seconds that one layer of one block takes.
        sleep: waits so many seconds.
        now: seconds of the clock that it waits on.

    """

    def __init__(
        self, inner: Engine, layer_s: float, sleep: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._inner = inner
        self._layer_s = layer_s
        self._sleep = sleep
        self._now = now
        self._known: dict[tuple[int, ...], tuple[list[Block], States]] = {}
        self.facts: SourceFacts = replace(inner.facts, name=f"{inner.facts.name}, paced at {layer_s * 1000} ms a layer")

    def prefill(self, work: Work) -> Generator[Block, None, States]:
        """See :class:`rowlock.daemon.prefill.engine.Engine`."""
        shape = (len(work.tokens), work.width, work.layers, work.chunk)
        if shape not in self._known:
            self._known[shape] = self._compute(work)
        blocks, logits = self._known[shape]
        due = self._now()
        for block in blocks:
            due += self._layer_s * len(block.states)
            self._sleep(max(0.0, due - self._now()))
            yield block
        return logits

    def _compute(self, work: Work) -> tuple[list[Block], States]:
        blocks: list[Block] = []
        prefill = self._inner.prefill(work)
        while True:
            try:
                block = next(prefill)
            except StopIteration as stop:
                return blocks, stop.value
            blocks.append(replace(block, states=block.states.copy()))
