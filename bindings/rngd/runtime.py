"""A resident model on RNGD: its allocations, and the prepared programs over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Self, cast

import torch

from rowlock.bindings.device import Allocation, DeviceFault, Sampling, Step, Variant
from rowlock.bindings.device import Sequence as SequenceOnDevice
from rowlock.bindings.memory import RowMemory
from rowlock.bindings.rngd.engine import Engine
from rowlock.bindings.rngd.program import StepInputs, new_keys_values
from rowlock.bindings.rngd.programs import LoadedProgram, ProgramSource
from rowlock.bindings.rngd.sdk import vendor_errors
from rowlock.bindings.rngd.sequence import RngdSequence
from rowlock.bindings.rngd.shape import ProgramSet, ProgramShape, program_shapes
from rowlock.bindings.unpaged import Unpaged
from rowlock.bindings.vendor_errors import as_device_error
from rowlock.bindings.weights import weight_dtype


class RngdRuntime(Unpaged):
    """See :class:`rowlock.bindings.device.Runtime`. Each sequence has K/V of its own, which no program takes in.

    Args:
        source: of its programs.
        wanted: those to begin with.
        allocations: by parent name, in the order in which programs take them.

    """

    def __init__(
        self,
        memory: RowMemory,
        engine: Engine,
        source: ProgramSource,
        wanted: ProgramSet,
        programs: Mapping[ProgramShape, LoadedProgram],
        allocations: Mapping[str, Allocation],
    ) -> None:
        self.allocations = allocations
        self._memory = memory
        self._engine = engine
        self._source = source
        self._model = wanted.model
        self._dtype = weight_dtype(wanted.model.parents[0])
        self._inputs = StepInputs(wanted.model.config, self._dtype)
        self._loaded = dict(programs)
        self._live = dict(allocations)

    @classmethod
    def create(cls, memory: RowMemory, engine: Engine, source: ProgramSource, wanted: ProgramSet) -> Self:
        """Load every program and allocate every parent. After an error nothing of it is left."""
        programs = source.load(wanted)  # first: one that cannot be had costs no allocation
        with ExitStack() as undo:
            allocations = {}
            for parent in wanted.model.parents:
                allocations[parent.name] = memory.allocate(parent)
                undo.callback(memory.release, allocations[parent.name])
            runtime = cls(memory, engine, source, wanted, programs, allocations)
            undo.pop_all()
        return runtime

    @property
    def programs(self) -> Mapping[str, str]:
        return {shape.name: loaded.digest for shape, loaded in self._loaded.items()}

    def add_variant(self, variant: Variant) -> None:
        shapes = program_shapes(self._model.config, (variant,))
        missing = tuple(shape for shape in shapes if shape not in self._loaded)
        found = self._source.load(ProgramSet(self._model, missing))
        # one assignment: ``programs`` is read on other threads
        self._loaded = dict(sorted((self._loaded | found).items()))

    def open_sequence(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> RngdSequence:
        assert self._live, "the runtime is closed"
        fitting = min(shape.capacity for shape in self._loaded if shape.capacity >= capacity)
        shapes = tuple(shape for shape in self._loaded if shape.capacity == fitting)
        with as_device_error(DeviceFault.OUT_OF_MEMORY, f"K/V of {fitting} tokens"):
            keys_values = new_keys_values(self._model.config, shapes[0], self._dtype).to(self._engine.torch_device)
        return RngdSequence(shapes, self._inputs, self._execute, keys_values, prompt, sampling)

    def advance(self, sequences: list[SequenceOnDevice]) -> list[Step]:
        """One after another: the prepared programs are for one sequence."""
        return [sequence.advance() for sequence in cast(list[RngdSequence], sequences)]

    def close(self) -> None:
        self._loaded = {}
        for name in list(self._live):
            self._memory.release(self._live[name])
            del self._live[name]

    def _execute(self, shape: ProgramShape, inputs: tuple[torch.Tensor, ...]) -> Sequence[torch.Tensor]:
        """Run a program over the resident weights: the very tensors that rows are written to."""
        weights = [self._memory.tensor(allocation) for allocation in self.allocations.values()]
        self._source.counters.executions += 1
        self._source.counters.native_calls += 1
        with vendor_errors(shape.name), torch.no_grad():
            placed = [item.to(self._engine.torch_device) for item in inputs]
            return self._loaded[shape].run(*placed, *weights)
