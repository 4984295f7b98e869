"""The decoder as a runtime: its weights are the allocations of a row memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final, Protocol, Self, cast

import torch

from rowlock.bindings.device import Allocation, Sampling, Sequence, Step
from rowlock.bindings.memory import RowMemory
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.decoder import Decoder
from rowlock.bindings.model.generation import DecoderSequence, Forward, Stepper
from rowlock.bindings.model.layout import Layout

SHARED_CHUNK: Final = 8
"""Prompt tokens of one step while others decode, for each thread: some 40 ms of a small model."""


class Processor(Protocol):
    """What the programs run on."""

    def create_decoder(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> tuple[Decoder, Forward]:
        """The decoder over these weights, which must not move, and how to call it."""
        ...

    def prepare(self) -> int:
        """Called before each step. Returns how wide it is: how many threads compute it, or what is as good as."""
        ...


class DecoderRuntime:
    """See :class:`rowlock.bindings.device.Runtime`."""

    def __init__(
        self, memory: RowMemory, processor: Processor, config: ModelConfig, allocations: Mapping[str, Allocation]
    ) -> None:
        self.allocations = allocations
        self.programs: Mapping[str, str] = {}
        self._memory = memory
        self._processor = processor
        self._live = dict(allocations)
        decoder, forward = processor.create_decoder(config, self.weights())
        self._decoder: Decoder | None = decoder
        self._stepper: Stepper | None = Stepper(forward)

    @classmethod
    def create(cls, memory: RowMemory, processor: Processor, config: ModelConfig, layout: Layout) -> Self:
        """Allocate every parent, content undefined. After an error nothing of it is left."""
        with ExitStack() as undo:
            allocations = {}
            for name, parent in layout.parents.items():
                allocations[name] = memory.allocate(parent)
                undo.callback(memory.release, allocations[name])
            runtime = cls(memory, processor, config, allocations)
            undo.pop_all()
        return runtime

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What the decoder computes with, ``[rows, columns]`` by parent: the resident bytes themselves."""
        return {name: self._memory.tensor(allocation) for name, allocation in self.allocations.items()}

    def open_sequence(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> DecoderSequence:
        assert self._decoder is not None, "the runtime is closed"
        return DecoderSequence(self._decoder, prompt, sampling, capacity)

    def advance(self, sequences: list[Sequence]) -> list[Step]:
        assert self._stepper is not None, "the runtime is closed"
        own = cast(list[DecoderSequence], sequences)
        return self._stepper.advance(own, SHARED_CHUNK * self._processor.prepare())

    def close(self) -> None:
        self._decoder = self._stepper = None
        for name in list(self._live):
            self._memory.release(self._live[name])
            del self._live[name]
