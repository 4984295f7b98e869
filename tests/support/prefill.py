"""Sources without a model, and the owner's end of a link to one."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rowlock.daemon.prefill.engine import Block, EngineError, EngineOptions, States, Work
from rowlock.daemon.prefill.protocol.frames import Done, Failed, Frame, Hello, Memory, Mode, Prefill, Span
from rowlock.daemon.prefill.protocol.geometry import Geometry, RequestLayout
from rowlock.daemon.prefill.protocol.hello import SourceFacts
from rowlock.daemon.prefill.protocol.link import Link
from rowlock.daemon.prefill.protocol.memory import OwnerMemory
from rowlock.daemon.prefill.worker import Worker

GEOMETRY = Geometry("BF16", kv_heads=2, head_dim=8, vocab=50, windows=(4, 4, None, 4, None))
"""Two cache groups, and layers of both in one block."""
FACTS = SourceFacts("synthetic", b"p" * 32, b"w" * 32, GEOMETRY, 4, (16, 64), True, False)
WAIT_S = 60


def states_of(tokens: tuple[int, ...], layer: int) -> np.ndarray:
    """Made-up K/V ``[2, kv_heads, tokens, head_dim]``: each value tells where it belongs."""
    shape = (2, GEOMETRY.kv_heads, len(tokens), GEOMETRY.head_dim)
    places = np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)
    return ((places * 31 + layer * 977 + np.array(tokens)[None, None, :, None]) % 65521).astype(np.uint16)


def logits_of(tokens: tuple[int, ...]) -> np.ndarray:
    return ((np.arange(GEOMETRY.vocab) * 7 + sum(tokens)) % 60000).astype(np.uint16)


@dataclass
class SyntheticEngine:
    """An engine that stores bytes and computes nothing: it stands for a device that is not here."""

    facts: SourceFacts = FACTS
    before_block: Callable[[int], None] = lambda _number: None
    done: list[Work] = field(default_factory=list)

    def prefill(self, work: Work) -> Generator[Block, None, States]:
        states = np.stack([states_of(work.tokens, layer) for layer in range(GEOMETRY.layers)])
        number = 0
        for token in range(0, len(work.tokens), work.chunk):
            for layer in range(0, GEOMETRY.layers, work.layers):
                self.before_block(number)
                yield Block(layer, token, states[layer : layer + work.layers, :, :, token : token + work.chunk])
                number += 1
        self.done.append(work)
        return logits_of(work.tokens)


def create(options: EngineOptions) -> SyntheticEngine:
    """The factory of processes that tests start. ``at``: the number of the block at which ``fault`` happens."""
    at, fault = int(options.extra.get("at", "-1")), options.extra.get("fault", "")

    def before_block(number: int) -> None:
        if number == at:
            FAULTS[fault]()

    if fault == "silent start":
        signal.pause()
    return SyntheticEngine(before_block=before_block)


def _fail() -> None:
    raise EngineError("the device is tired")


FAULTS: dict[str, Callable[[], Any]] = {
    "die": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "error": _fail,
}


def prefill_of(request: int, tokens: tuple[int, ...], mode: Mode = Mode.STREAM, **fields: Any) -> Prefill:
    plain = {
        "generation": 3, "program": FACTS.program, "weights": FACTS.weights, "layers_per_span": 2, "chunk": 0,
        "firsts": (max(0, len(tokens) - 3), 0),
    }  # fmt: skip
    return Prefill(request=request, tokens=tokens, mode=mode, **{**plain, **fields})


class OwnerEnd:
    """What an owner does with a link, as simply as can be."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.memories: dict[int, OwnerMemory] = {}

    def next(self) -> Frame:
        received = self.link.receive()
        assert received is not None, "the source has closed its end"
        if isinstance(received.frame, Memory):
            self.memories[received.frame.request] = OwnerMemory.attach(received.fd, received.frame.nbytes)
        return received.frame

    def until_end(self) -> tuple[list[Span], Done | Failed]:
        """The spans of one request, and its last frame."""
        spans: list[Span] = []
        while True:
            frame = self.next()
            if isinstance(frame, Done | Failed):
                return spans, frame
            if isinstance(frame, Span):
                spans.append(frame)

    def states(self, prefill: Prefill, span: Span) -> np.ndarray:
        """``[layers, 2, kv_heads, tokens, head_dim]`` of a span."""
        layout = RequestLayout(GEOMETRY, len(prefill.tokens), prefill.firsts)
        first = layout.first(span.layer)
        data = np.frombuffer(self.memories[prefill.request].data, np.uint16)
        start, stop = layout.offsets[span.layer] // 2, layout.offsets[span.layer_stop] // 2
        region = data[start:stop].reshape(span.layer_stop - span.layer, 2, GEOMETRY.kv_heads, -1, GEOMETRY.head_dim)
        return region[:, :, :, span.token - first : span.token_stop - first].copy()

    def logits(self, prefill: Prefill) -> np.ndarray:
        layout = RequestLayout(GEOMETRY, len(prefill.tokens), prefill.firsts)
        data = np.frombuffer(self.memories[prefill.request].data, np.uint8)
        return data[layout.logits_offset : layout.nbytes].view(np.uint16).copy()


@contextlib.contextmanager
def running_worker(engine: SyntheticEngine, memory_max: int = 1 << 30) -> Iterator[OwnerEnd]:
    """A worker on a thread of this process; its hello has been read."""
    own, other = Link.pair()
    errors: list[BaseException] = []

    def run() -> None:
        with other:
            try:
                Worker(Link(other), engine, memory_max).run()
            except BaseException as error:  # noqa: BLE001 - raised again where the test is
                errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    end = OwnerEnd(own)
    assert isinstance(end.next(), Hello)
    try:
        yield end
    finally:
        own.close()
        thread.join(WAIT_S)
        for memory in end.memories.values():
            memory.close()
    if errors:
        raise errors[0]
