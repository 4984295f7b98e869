"""The source: prompts in, K/V out, one prompt at a time. Needs no torch; the engine may."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np

from rowlock.daemon.prefill.engine import Block, Engine, EngineError, States, Work
from rowlock.daemon.prefill.protocol.frames import (
    Done,
    Failed,
    Frame,
    FrameError,
    FrameFault,
    Memory,
    Mode,
    Prefill,
    Refusal,
    Release,
    Span,
)
from rowlock.daemon.prefill.protocol.geometry import DTYPE_CODES, DTYPES, RequestLayout
from rowlock.daemon.prefill.protocol.hello import hello_of
from rowlock.daemon.prefill.protocol.link import Link
from rowlock.daemon.prefill.protocol.memory import MemoryShortError, SourceMemory

WHOLE_BLOCKS: Final = 10
"""Blocks of layers in which a whole result is computed, at most: between two of them it can be given up."""
PROMPTS_MAX: Final = 1024
"""Prompts that may wait; an owner asks for far fewer at a time."""


class _GoneError(Exception):
    """The owner has closed its end."""


class _Refused(Exception):  # noqa: N818 - an answer, not a mistake of this process
    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


class Worker:
    """Serves one owner until it closes its end.

    Args:
        link: to the owner.
        engine: computes.
        memory_max: bytes that the memory of one request may have.
        now_ns: CLOCK_MONOTONIC.

    """

    def __init__(
        self, link: Link, engine: Engine, memory_max: int, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._link = link
        self._engine = engine
        self._memory_max = memory_max
        self._now_ns = now_ns
        self._waiting: deque[Prefill] = deque()
        self._current: Prefill | None = None
        self._released = False

    def run(self) -> None:
        """Announce, then compute until the owner is gone.

        Raises:
            FrameError: the owner sent something that is no frame for a source.

        """
        self._link.send(hello_of(self._engine.facts))
        try:
            while True:
                self._look(wait=not self._waiting)
                if self._waiting:
                    self._serve(self._waiting.popleft())
        except (_GoneError, BrokenPipeError, ConnectionResetError):
            return

    def _look(self, *, wait: bool) -> None:
        """Take in what the owner has sent; with ``wait``, not before there is something."""
        while True:
            try:
                received = self._link.receive(wait=wait)
            except BlockingIOError:
                return
            if received is None:
                raise _GoneError
            self._take(received.frame)
            wait = False

    def _take(self, frame: Frame) -> None:
        match frame:
            case Prefill():
                live = [item.request for item in (*self._waiting, self._current) if item is not None]
                if frame.request in live:
                    raise FrameError(FrameFault.MALFORMED, f"prefill.request {frame.request} is live already")
                if len(live) >= PROMPTS_MAX:
                    raise FrameError(FrameFault.OVERSIZED, f"prefill: {PROMPTS_MAX} prompts wait already")
                self._waiting.append(frame)
            case Release():
                self._waiting = deque(item for item in self._waiting if item.request != frame.request)
                if self._current is not None and self._current.request == frame.request:
                    self._released = True
            case _:
                raise FrameError(FrameFault.UNKNOWN, f"{type(frame).__name__.lower()} is nothing for a source")

    def _serve(self, prefill: Prefill) -> None:
        self._current, self._released = prefill, False
        try:
            self._compute(prefill)
        except _Refused as refused:
            self._link.send(Failed(prefill.request, prefill.generation, refused.refusal, str(refused)))
        finally:
            self._current = None

    def _compute(self, prefill: Prefill) -> None:
        width = self._judge(prefill)
        layout = RequestLayout(self._engine.facts.geometry, len(prefill.tokens), prefill.firsts)
        with self._memory(layout) as memory:
            self._link.send(Memory(prefill.request, prefill.generation, layout.nbytes), memory.fd)
            answer = _Answer(self._link, prefill, layout, memory, self._now_ns)
            try:
                self._run_engine(prefill, width, answer)
            finally:
                answer.forget()

    def _run_engine(self, prefill: Prefill, width: int, answer: _Answer) -> None:
        facts, count, layers = self._engine.facts, len(prefill.tokens), self._engine.facts.geometry.layers
        if facts.streams:
            whole = prefill.mode is Mode.WHOLE
            layers = math.ceil(layers / WHOLE_BLOCKS) if whole else prefill.layers_per_span
        work = Work(
            tokens=prefill.tokens,
            width=width,
            layers=layers,
            chunk=min(prefill.chunk or count, count) if facts.streams else count,
        )
        blocks = self._engine.prefill(work)
        try:
            while not self._released:
                answer.add(next(blocks))
                self._look(wait=False)
        except StopIteration as stop:
            answer.finish(stop.value)
        except EngineError as error:
            raise _Refused(Refusal.COMPUTE, str(error)) from error
        finally:
            blocks.close()

    def _judge(self, prefill: Prefill) -> int:
        """The width for a prompt. Raises _Refused."""
        facts = self._engine.facts
        if (prefill.program, prefill.weights) != (facts.program, facts.weights):
            raise _Refused(Refusal.IDENTITY, "prefill.program or prefill.weights is not what is resident here")
        if len(prefill.firsts) != len(facts.geometry.groups):
            raise _Refused(
                Refusal.ARGUMENT,
                f"prefill.firsts has {len(prefill.firsts)} groups, there are {len(facts.geometry.groups)}",
            )
        if max(prefill.tokens) >= facts.geometry.vocab:
            raise _Refused(
                Refusal.ARGUMENT, f"prefill.tokens: {max(prefill.tokens)} is not below {facts.geometry.vocab}"
            )
        if prefill.mode is not Mode.WHOLE and not facts.streams:
            raise _Refused(Refusal.ARGUMENT, "prefill.mode: this source does not stream")
        width = facts.width_for(len(prefill.tokens))
        if width is None:
            raise _Refused(
                Refusal.WIDTH, f"{len(prefill.tokens)} tokens; the widest program here is for {facts.widths[-1]}"
            )
        return width

    @contextmanager
    def _memory(self, layout: RequestLayout) -> Iterator[SourceMemory]:
        if layout.nbytes > self._memory_max:
            raise _Refused(
                Refusal.MEMORY, f"K/V and logits need {layout.nbytes} bytes; {self._memory_max} are allowed here"
            )
        try:
            memory = SourceMemory.create(layout.nbytes)
        except MemoryShortError as error:
            raise _Refused(Refusal.MEMORY, str(error)) from error
        try:
            yield memory
        finally:
            memory.close()


@dataclass
class _Answer:
    """What one prompt's K/V becomes: copied first, announced after."""

    link: Link
    prefill: Prefill
    layout: RequestLayout
    memory: SourceMemory
    now_ns: Callable[[], int]

    def __post_init__(self) -> None:
        geometry = self.layout.geometry
        self._values = np.frombuffer(self.memory.data, f"u{DTYPES[geometry.dtype]}", offset=0)
        self._held: list[Span] = []
        self._sent = 0
        self._last_ns = self.now_ns()

    def add(self, block: Block) -> None:
        """Copy a block to where it belongs, and announce it where spans are announced at once."""
        self._last_ns = self.now_ns()
        for layer, layer_stop in self.layout.geometry.runs(block.layer, block.layer_stop):
            first = max(block.token, self.layout.first(layer))
            if first < block.token_stop:
                states = block.states[layer - block.layer : layer_stop - block.layer, :, :, first - block.token :]
                self._place(layer, first, states)
                self._announce(self._span(layer, layer_stop, first, block.token_stop))

    def finish(self, logits: States) -> None:
        """Copy the logits, announce what was held back, and that this is all."""
        geometry, size = self.layout.geometry, DTYPES[self.layout.geometry.dtype]
        start = self.layout.logits_offset // size
        self._values[start : start + geometry.vocab] = logits.view(self._values.dtype)
        if self.prefill.mode is Mode.WHOLE:
            self._held = self._whole()
        for span in self._held:
            self._send(span)
        request, generation, dtype = self.prefill.request, self.prefill.generation, DTYPE_CODES[geometry.dtype]
        self.link.send(Done(request, generation, self._sent, dtype, geometry.vocab, self._last_ns))

    def forget(self) -> None:
        """Give up the view of the memory, so that it can be closed."""
        del self._values

    def _place(self, layer: int, token: int, states: States) -> None:
        geometry = self.layout.geometry
        kept = self.layout.tokens - self.layout.first(layer)
        start = self.layout.offsets[layer] // DTYPES[geometry.dtype]
        shape = (len(states), 2, geometry.kv_heads, kept, geometry.head_dim)
        region = self._values[start : start + np.prod(shape)].reshape(shape)
        at = token - self.layout.first(layer)
        region[:, :, :, at : at + states.shape[3]] = states.view(self._values.dtype)

    def _span(self, layer: int, layer_stop: int, token: int, token_stop: int) -> Span:
        geometry, prefill = self.layout.geometry, self.prefill
        return Span(
            prefill.request, prefill.generation, layer, layer_stop, token, token_stop, DTYPE_CODES[geometry.dtype],
            geometry.kv_heads, geometry.head_dim, self._last_ns,
        )  # fmt: skip

    def _whole(self) -> list[Span]:
        """One span for each run of layers of one group."""
        return [
            self._span(layer, stop, self.layout.first(layer), self.layout.tokens)
            for layer, stop in self.layout.geometry.runs(0, self.layout.geometry.layers)
            if self.layout.first(layer) < self.layout.tokens
        ]

    def _announce(self, span: Span) -> None:
        if self.prefill.mode is Mode.STREAM:
            self._send(span)
        elif self.prefill.mode is Mode.DEFERRED:
            self._held.append(span)

    def _send(self, span: Span) -> None:
        self.link.send(span)
        self._sent += 1
