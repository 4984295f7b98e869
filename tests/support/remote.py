"""A runtime, and a source of the same checkpoint on a thread of this process, and every byte between them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.cpu.binding import CpuBinding
from rowlock.bindings.device import Sampling
from rowlock.bindings.model.cache.geometry import CacheLimits
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import layout_of
from rowlock.daemon.owner.requests import Lease
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.text import Text
from rowlock.daemon.prefill.decoder_engine import create
from rowlock.daemon.prefill.engine import EngineOptions
from rowlock.daemon.prefill.fitting import geometry_of
from rowlock.daemon.prefill.importing import ImportedPrompt
from rowlock.daemon.prefill.life import Arrival
from rowlock.daemon.prefill.protocol.frames import Done, Hello, Memory, Mode, Prefill, Span
from rowlock.daemon.prefill.protocol.hello import parse_hello
from rowlock.daemon.prefill.protocol.link import Link
from rowlock.daemon.prefill.protocol.memory import OwnerMemory
from rowlock.daemon.prefill.worker import Worker
from support.prefill import WAIT_S

GENERATION = 3
Order = Callable[[list[Span]], list[Span]]


def in_order(spans: list[Span]) -> list[Span]:
    return spans


def reversed_order(spans: list[Span]) -> list[Span]:
    return spans[::-1]


def shuffled(seed: int) -> Order:
    def order(spans: list[Span]) -> list[Span]:
        return random.Random(seed).sample(spans, len(spans))

    return order


@dataclass
class Computed:
    """What a prompt came to.

    Attributes:
        states: of each layer ``[2, kv_heads, T, head_dim]``, as far as its window reaches.
        logits: of the last token.
        tokens: greedy, the first from these logits.

    """

    states: list[np.ndarray]
    logits: np.ndarray
    tokens: list[int] = field(default_factory=list)

    def differs(self, other: Computed) -> str:
        """Where the two are not the same, bit by bit; or empty."""
        for layer, (mine, theirs) in enumerate(zip(self.states, other.states, strict=True)):
            if mine.shape != theirs.shape or not (mine == theirs).all():
                return f"K/V of layer {layer}"
        if not (self.logits == other.logits).all():
            return "logits"
        return "" if self.tokens == other.tokens else f"tokens {self.tokens} and {other.tokens}"


class Pair:
    """A runtime and a source."""

    def __init__(self, checkpoint: Path, link: Link, limits: CacheLimits) -> None:
        self.binding = CpuBinding(1, limits=limits)
        with Checkpoint.open(checkpoint) as opened:
            self.config = parse_config(checkpoint, opened.config)
            self.layout = layout_of(opened, self.config)
            self.runtime = self.binding.create_runtime(self.config, self.layout)
            for name, placement in self.layout.placements.items():
                data = np.empty(placement.tensor.nbytes, np.uint8)
                opened.read_into(name, 0, data)
                self.binding.memory.write_rows(self.runtime.allocations[placement.parent], placement.first_row, data)
        self.geometry = geometry_of(self.config, self.layout)
        self._link = link
        hello = cast(Hello, self._next())
        self.facts = parse_hello(hello)
        self.prompts_computed = 0
        self._logits: list[torch.Tensor] = []
        self._watch_logits()

    @property
    def cache(self) -> Any:
        return self.runtime._current_cache()

    def local(self, prompt: Sequence[int], count: int) -> Computed:
        """A prompt computed by the runtime itself, and so many tokens."""
        sequence = self.runtime.open_sequence(tuple(prompt), Sampling(), len(prompt) + count)
        token = None
        while token is None:
            (token,) = self.runtime.advance([sequence])
        computed = Computed(self._states(sequence, len(prompt)), bits(self._logits[-1][0]), [cast(int, token)])
        return self._go_on(sequence, computed, count)

    def remote(
        self, prompt: Sequence[int], count: int, mode: Mode, layers: int = 1, chunk: int = 0, order: Order = in_order
    ) -> Computed:
        """A prompt computed by the source, its spans taken in a certain order, and so many tokens."""
        imported = self.begin(prompt, count, mode, layers, chunk)
        self.deliver(imported, order)
        return self._go_on(*self._admitted(imported), count)

    def begin(self, prompt: Sequence[int], count: int, mode: Mode, layers: int, chunk: int) -> ImportedPrompt:
        importer = self.runtime.importer
        assert importer is not None
        room = importer.open(tuple(prompt), Sampling(), len(prompt) + count)
        identity = Identity(self.facts.program.hex(), "00" * 32, self.facts.weights.hex())
        lease = Lease(identity, GENERATION, cast(Text, None))
        self.prompts_computed += 1
        number = self.prompts_computed
        item = ImportedPrompt(
            number, self.geometry, tuple(prompt), room, importer, lease, lambda _item: None, lambda: 1
        )
        self._link.send(
            Prefill(
                number, GENERATION, self.facts.program, self.facts.weights, mode, layers, chunk, item.layout.firsts,
                tuple(prompt),
            )
        )  # fmt: skip
        return item

    def deliver(self, imported: ImportedPrompt, order: Order) -> None:
        """Everything up to its end; the spans in another order than they came in."""
        spans: list[Span] = []
        while not isinstance(frame := self._next(), Done):
            if isinstance(frame, Span):
                spans.append(frame)
            else:
                imported.take(Arrival(cast(Memory, frame), self._memory))
        for span in order(spans):
            imported.take(Arrival(span))
        imported.take(Arrival(frame))
        imported.copy()
        assert imported.error is None, imported.error
        assert imported.complete

    def together(self, prompts: Sequence[Sequence[int]], count: int, order: Order) -> list[Computed]:
        """Several prompts asked for before any has come; all that came is taken in a certain order, then all done."""
        items = {item.number: item for item in (self.begin(prompt, count, Mode.STREAM, 1, 20) for prompt in prompts)}
        spans: list[Span] = []
        ends: list[Done] = []
        while len(ends) < len(items):
            frame = self._next()
            if isinstance(frame, Memory):
                items[frame.request].take(Arrival(frame, self._memory))
            elif isinstance(frame, Span):
                spans.append(frame)
            else:
                ends.append(frame)
        for frame in [*order(spans), *ends[::-1]]:
            items[frame.request].take(Arrival(frame))
            items[frame.request].copy()
        found = {}
        for item in reversed(items.values()):
            assert item.complete, item.error
            found[item.number] = self._admitted(item)
        running = list(found.values())
        while len(running[0][1].tokens) < count:
            steps = self.runtime.advance([sequence for sequence, _ in running])
            for (_, computed), step in zip(running, steps, strict=True):
                computed.tokens.append(cast(int, step))
        for sequence, _ in running:
            sequence.close()
        self.cache.check_integrity()
        return [found[number][1] for number in items]

    def admit(self, imported: ImportedPrompt) -> tuple[Any, Any]:
        model = type("Model", (), {"identity": imported.lease.identity})
        resident = type("Resident", (), {"generation": GENERATION, "model": model})
        return imported.admit(cast(Resident, resident))

    def _admitted(self, imported: ImportedPrompt) -> tuple[Any, Computed]:
        """The sequence, and what there is of it."""
        logits = np.array(imported._logits()).view(np.int16)
        sequence, token = self.admit(imported)
        return sequence, Computed(self._states(sequence, len(imported.prompt)), logits, [cast(int, token)])

    def _go_on(self, sequence: Any, computed: Computed, count: int) -> Computed:
        while len(computed.tokens) < count:
            (token,) = self.runtime.advance([sequence])
            computed.tokens.append(cast(int, token))
        sequence.close()
        self.cache.check_integrity()
        return computed

    def _states(self, sequence: Any, count: int) -> list[np.ndarray]:
        found = []
        for layer, window in enumerate(self.geometry.windows):
            first = 0 if window is None else max(0, count - window + 1)
            keys, values = sequence.pages.read(layer, count)
            found.append(np.stack([bits(keys[:, first:]), bits(values[:, first:])]))
        return found

    def _next(self) -> Any:
        received = self._link.receive()
        assert received is not None, "the source has ended"
        if isinstance(received.frame, Memory):
            self._memory = OwnerMemory.attach(received.fd, received.frame.nbytes)
        return received.frame

    def _watch_logits(self) -> None:
        programs = self.runtime._programs
        forward = programs.forward

        def watched(spans: Any) -> torch.Tensor:
            self._logits[:] = [forward(spans).clone()]
            return self._logits[-1]

        self.runtime._stepper._programs = type(
            "Watched",
            (),
            {"forward": staticmethod(watched), "settled": programs.settled, "replayed": programs.replayed},
        )()


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.int16).numpy().copy()


@contextlib.contextmanager
def pair_of(
    checkpoint: Path, page_tokens: int = 32, widths: tuple[int, ...] = (128, 512, 2048), device: str = "cpu",
    **extra: str,
) -> Iterator[Pair]:  # fmt: skip
    """Both, until the block ends."""
    engine = create(EngineOptions(checkpoint, device, threads=1, widths=widths, extra=extra))
    own, other = Link.pair()
    with ThreadPoolExecutor(1) as executor, other:
        done = executor.submit(Worker(Link(other), engine, 1 << 34).run)
        try:
            pair = Pair(checkpoint, own, CacheLimits(page_tokens=page_tokens))
            yield pair
            pair.binding.close()
        finally:
            own.close()
            done.result(WAIT_S)
