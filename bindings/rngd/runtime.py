"""A resident model on RNGD: its allocations, and the prepared programs over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Self, cast

import torch

from rowlock.bindings.device import Allocation, Counters, DeviceFault, Sampling, Step
from rowlock.bindings.device import Sequence as SequenceOnDevice
from rowlock.bindings.memory import RowMemory
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout
from rowlock.bindings.rngd.engine import Engine
from rowlock.bindings.rngd.program import StepInputs, Variant, new_keys_values
from rowlock.bindings.rngd.programs import LoadedProgram, ProgramSource
from rowlock.bindings.rngd.sdk import vendor_errors
from rowlock.bindings.rngd.sequence import RngdSequence
from rowlock.bindings.rngd.shape import ModelShape
from rowlock.bindings.unpaged import Unpaged
from rowlock.bindings.vendor_errors import as_device_error
from rowlock.bindings.weights import weight_dtype


class RngdRuntime(Unpaged):
    """See :class:`rowlock.bindings.device.Runtime`. Each sequence has K/V of its own, which no program takes in.

    Args:
        dtype: of weights and K/V.
        allocations: by parent name, in the order in which programs take them.

    """

    def __init__(
        self,
        memory: RowMemory,
        engine: Engine,
        counters: Counters,
        config: ModelConfig,
        dtype: torch.dtype,
        programs: Mapping[Variant, LoadedProgram],
        allocations: Mapping[str, Allocation],
    ) -> None:
        self.allocations = allocations
        self.programs = {variant.name: loaded.digest for variant, loaded in programs.items()}
        self._memory = memory
        self._engine = engine
        self._counters = counters
        self._config = config
        self._dtype = dtype
        self._inputs = StepInputs(config, dtype)
        self._loaded = dict(programs)
        self._live = dict(allocations)

    @classmethod
    def create(
        cls, memory: RowMemory, engine: Engine, source: ProgramSource, config: ModelConfig, layout: Layout
    ) -> Self:
        """Prepare every program and allocate every parent. After an error nothing of it is left."""
        # programs first: one that cannot be had costs no allocation
        shape = ModelShape.of(config, layout)
        programs, dtype = source.load(shape), weight_dtype(shape.parents[0])
        with ExitStack() as undo:
            allocations = {}
            for name, parent in layout.parents.items():
                allocations[name] = memory.allocate(parent)
                undo.callback(memory.release, allocations[name])
            runtime = cls(memory, engine, source.counters, config, dtype, programs, allocations)
            undo.pop_all()
        return runtime

    def open_sequence(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> RngdSequence:
        assert self._live, "the runtime is closed"
        fitting = min(variant.capacity for variant in self._loaded if variant.capacity >= capacity)
        variants = tuple(variant for variant in self._loaded if variant.capacity == fitting)
        with as_device_error(DeviceFault.OUT_OF_MEMORY, f"K/V of {fitting} tokens"):
            keys_values = new_keys_values(self._config, variants[0], self._dtype).to(self._engine.torch_device)
        return RngdSequence(variants, self._inputs, self._execute, keys_values, prompt, sampling)

    def advance(self, sequences: list[SequenceOnDevice]) -> list[Step]:
        """One after another: the prepared programs are for one sequence."""
        return [sequence.advance() for sequence in cast(list[RngdSequence], sequences)]

    def close(self) -> None:
        self._loaded = {}
        for name in list(self._live):
            self._memory.release(self._live[name])
            del self._live[name]

    def _execute(self, variant: Variant, inputs: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
        """Run a program over the resident weights: the very tensors that rows are written to."""
        weights = [self._memory.tensor(allocation) for allocation in self.allocations.values()]
        self._counters.executions += 1
        self._counters.native_calls += 1
        with vendor_errors(variant.name), torch.no_grad():
            placed = [item.to(self._engine.torch_device) for item in inputs]
            return self._loaded[variant].run(*placed, *weights)
