"""The CPU binding: torch on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rowlock.bindings.cpu.storage import HostDevice
from rowlock.bindings.cpu.threads import HostThreads
from rowlock.bindings.device import Counters, DeviceFacts, Variant, never
from rowlock.bindings.faults import FaultFile
from rowlock.bindings.memory import RowMemory
from rowlock.bindings.model.cache.fitting import refuse_unfit
from rowlock.bindings.model.cache.geometry import DEFAULT_LIMITS, CacheLimits
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout
from rowlock.bindings.model.runtime import DecoderRuntime


class CpuBinding:
    """See :class:`rowlock.bindings.device.Binding`.

    Args:
        threads: threads of one operation.
        limits: of the K/V cache.
        fault_file: test option, see :mod:`rowlock.bindings.faults`.

    """

    def __init__(self, threads: int, fault_file: Path | None = None, limits: CacheLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self.counters = Counters()
        self._threads = HostThreads(threads, self.counters)
        self.memory = RowMemory(self.counters, HostDevice(FaultFile(fault_file) if fault_file else None))
        self.facts = DeviceFacts(
            device="cpu",
            logical="cpu",
            binding="cpu",
            versions={"torch": torch.__version__},
            readback="storage",
            execution="native",
            imports=True,
            host_memory=True,
            test_options=(f"fault_file={fault_file}",) if fault_file else (),
        )

    def place(self, layout: Layout) -> Layout:
        return layout

    def prepare(
        self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...], given_up: Callable[[], bool] = never
    ) -> None:
        """Programs are not compiled here."""
        refuse_unfit(config, layout, self._limits, variants)

    def create_runtime(self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...] = ()) -> DecoderRuntime:
        del variants  # any shape runs at any time
        runtime = DecoderRuntime.create(self.memory, self._threads, config, layout, self._limits)
        self.counters.program_loads += 1
        return runtime

    def close(self) -> None:
        self.memory.close()
