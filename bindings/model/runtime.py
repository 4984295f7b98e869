"""The decoder as a runtime: its weights are the allocations of a row memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Final, Protocol, Self, cast

import torch

from rowlock.bindings.device import Allocation, CacheUse, DeviceError, DeviceFault, Sampling, Sequence, Step, Variant
from rowlock.bindings.memory import RowMemory
from rowlock.bindings.model.cache.geometry import SPAN_TOKENS, CacheLimits, plan_geometry
from rowlock.bindings.model.cache.paged import PagedCache
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.decoder import Programs
from rowlock.bindings.model.generation import DecoderSequence, Stepper
from rowlock.bindings.model.importing import DecoderImporter
from rowlock.bindings.model.layout import Layout

SHARED_CHUNK: Final = 8
"""Prompt tokens of one step while others decode, for each thread: some 40 ms of a small model."""


class Processor(Protocol):
    """What the programs run on."""

    def create_decoder(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Programs:
        """The decoder over these weights, which must not move."""
        ...

    def free_bytes(self) -> int:
        """Memory that pages of K/V could take, in bytes."""
        ...

    def prepare(self) -> int:
        """Called before each step. Returns how wide it is: how many threads compute it, or what is as good as."""
        ...


class DecoderRuntime:
    """See :class:`rowlock.bindings.device.Runtime`."""

    def __init__(
        self,
        memory: RowMemory,
        processor: Processor,
        config: ModelConfig,
        limits: CacheLimits,
        allocations: Mapping[str, Allocation],
    ) -> None:
        self.allocations = allocations
        self.programs: Mapping[str, str] = {}
        self._memory = memory
        self._processor = processor
        self._live = dict(allocations)
        weights = self.weights()
        states = weights["embed"]
        geometry = plan_geometry(config, states.dtype.itemsize, limits, processor.free_bytes())
        self._cache: PagedCache | None = PagedCache(config, geometry, states.dtype, states.device)
        self._programs = processor.create_decoder(config, weights)
        self._stepper: Stepper | None = Stepper(self._programs)
        self._writes = memory.writes_total

    @classmethod
    def create(
        cls, memory: RowMemory, processor: Processor, config: ModelConfig, layout: Layout, limits: CacheLimits
    ) -> Self:
        """Allocate every parent, content undefined. After an error nothing of it is left."""
        with ExitStack() as undo:
            allocations = {}
            for name, parent in layout.parents.items():
                allocations[name] = memory.allocate(parent)
                undo.callback(memory.release, allocations[name])
            runtime = cls(memory, processor, config, limits, allocations)
            undo.pop_all()
        return runtime

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What the decoder computes with, ``[rows, columns]`` by parent: the resident bytes themselves."""
        return {name: self._memory.tensor(allocation) for name, allocation in self.allocations.items()}

    @property
    def importer(self) -> DecoderImporter:
        return DecoderImporter(self._current_cache, self._programs, self._memory, self.asked)

    @property
    def cache(self) -> CacheUse:
        return self._cache.use if self._cache is not None else CacheUse()

    def asked(self, what: str) -> AbstractContextManager[None]:
        """Around everything that is asked of the device."""
        del what
        return nullcontext()

    def add_variant(self, variant: Variant) -> None:
        """Any shape runs at any time."""

    def open_sequence(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> DecoderSequence:
        cache = self._current_cache()
        lacking = cache.lacking(capacity)
        if lacking:
            raise DeviceError(DeviceFault.CAPACITY, lacking)
        with self.asked("opening a sequence"):
            return DecoderSequence.opened(cache, self._programs, prompt, sampling, capacity)

    def has_room(self, *tokens: int) -> bool:
        return self._current_cache().has_room(*tokens)

    def forget(self) -> None:
        if self._cache is not None:
            self._cache.forget_prefixes()

    def advance(self, sequences: list[Sequence]) -> list[Step]:
        cache = self._current_cache()
        assert self._stepper is not None
        shared_chunk = min(SHARED_CHUNK * self._processor.prepare(), SPAN_TOKENS)
        with self.asked("a step of the decoder"):
            steps = self._stepper.advance(cast(list[DecoderSequence], sequences), shared_chunk)
        if any(step is not None and not isinstance(step, int) for step in steps):
            cache.check_integrity()
        return steps

    def close(self) -> None:
        self._cache = self._stepper = None
        for name in list(self._live):
            self._memory.release(self._live[name])
            del self._live[name]

    def _current_cache(self) -> PagedCache:
        """The cache, in which nothing is found that was computed before the last write to the memory."""
        assert self._cache is not None, "the runtime is closed"
        if self._writes != self._memory.writes_total:
            self._writes = self._memory.writes_total
            self._cache.forget_prefixes()
        return self._cache
