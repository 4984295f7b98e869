"""The CPU binding: torch on the host."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, cast

import torch

from rowlock.bindings.cpu.faults import FaultFile
from rowlock.bindings.cpu.memory import CpuMemory
from rowlock.bindings.cpu.storage import FaultyStorage, HostStorage, Storage
from rowlock.bindings.cpu.threads import HostThreads
from rowlock.bindings.device import Allocation, Counters, DeviceFacts, Sampling, Sequence, Step
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.decoder import Decoder
from rowlock.bindings.model.generation import DecoderSequence, Stepper
from rowlock.bindings.model.layout import Layout, ParentInfo

SHARED_CHUNK: Final = 8
"""Prompt tokens of one step while others decode, for each thread: some 40 ms of a small model."""


class CpuBinding:
    """See :class:`rowlock.bindings.device.Binding`.

    Args:
        threads: threads of one operation.
        fault_file: test option, see :mod:`rowlock.bindings.cpu.faults`.

    """

    def __init__(self, threads: int, fault_file: Path | None = None) -> None:
        self._threads = HostThreads(threads)
        faults = FaultFile(fault_file) if fault_file else None

        def create_storage(parent: ParentInfo) -> Storage:
            storage = HostStorage(parent)
            return FaultyStorage(storage, faults) if faults else storage

        self.counters = Counters()
        self.memory = CpuMemory(self.counters, create_storage)
        self.facts = DeviceFacts(
            device="cpu",
            logical="cpu",
            binding="cpu",
            versions={"torch": torch.__version__},
            readback="storage",
            execution="native",
            test_options=(f"fault_file={fault_file}",) if fault_file else (),
        )

    def leave(self, threads: int) -> None:
        self._threads.leave(threads)

    def place(self, layout: Layout) -> Layout:
        return layout

    def create_runtime(self, config: ModelConfig, layout: Layout) -> CpuRuntime:
        with ExitStack() as undo:
            allocations = {}
            for name, parent in layout.parents.items():
                allocations[name] = self.memory.allocate(parent)
                undo.callback(self.memory.release, allocations[name])
            runtime = CpuRuntime(self.memory, self._threads, config, allocations)
            undo.pop_all()
        self.counters.program_loads += 1
        return runtime

    def close(self) -> None:
        self.memory.close()


class CpuRuntime:
    """See :class:`rowlock.bindings.device.Runtime`."""

    def __init__(
        self, memory: CpuMemory, threads: HostThreads, config: ModelConfig, allocations: Mapping[str, Allocation]
    ) -> None:
        self.allocations = allocations
        self._memory = memory
        self._threads = threads
        self._live = dict(allocations)
        weights = {name: memory.tensor(allocation) for name, allocation in allocations.items()}
        decoder, forward = threads.create_decoder(config, weights)
        self._decoder: Decoder | None = decoder
        self._stepper: Stepper | None = Stepper(forward)

    def open_sequence(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> DecoderSequence:
        assert self._decoder is not None, "the runtime is closed"
        return DecoderSequence(self._decoder, prompt, sampling, capacity)

    def advance(self, sequences: list[Sequence]) -> list[Step]:
        assert self._stepper is not None, "the runtime is closed"
        own = cast(list[DecoderSequence], sequences)
        width = self._threads.prepare()
        return self._stepper.advance(own, SHARED_CHUNK * width)

    def close(self) -> None:
        self._decoder = self._stepper = None
        for name in list(self._live):
            self._memory.release(self._live[name])
            del self._live[name]
