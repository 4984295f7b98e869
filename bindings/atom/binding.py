"""The ATOM binding: weights in torch-rbln tensors, rows written by batched copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from rowlock.bindings.address import DeviceAddress
from rowlock.bindings.atom import rebel_sdk
from rowlock.bindings.atom.artifacts import ArtifactRuntime, ParsedGraphs
from rowlock.bindings.atom.runtime import HostReferenceRuntime
from rowlock.bindings.atom.sdk import DISTRIBUTION, RblnModule, package_version
from rowlock.bindings.atom.storage import RblnDevice
from rowlock.bindings.cpu.threads import HostThreads
from rowlock.bindings.device import Counters, DeviceError, DeviceFacts, DeviceFault, Runtime, Variant, never
from rowlock.bindings.faults import FaultFile
from rowlock.bindings.memory import RowMemory
from rowlock.bindings.model.cache.fitting import refuse_unfit
from rowlock.bindings.model.cache.geometry import DEFAULT_LIMITS, CacheLimits
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout

DUMMY: Final = "RBLN_DUMMY_DEVICE: there is no NPU, tensors live in host memory"


class AtomBinding:
    """See :class:`rowlock.bindings.device.Binding`.

    Whether a readback comes from the NPU's memory, or from a copy that the vendor's runtime keeps on the
    host, cannot be told without a card: ``readback`` is ``unproven``.

    Args:
        address: the device.
        rbln: the vendor's module, loaded.
        threads: of one operation of the host's programs.
        fault_file: test option, see :mod:`rowlock.bindings.faults`.

    """

    def __init__(
        self,
        address: DeviceAddress,
        rbln: RblnModule,
        threads: int,
        fault_file: Path | None = None,
        limits: CacheLimits = DEFAULT_LIMITS,
    ) -> None:
        self._limits = limits
        device = RblnDevice(rbln, address.logical, FaultFile(fault_file) if fault_file else None)
        self.counters = Counters()
        self._threads = HostThreads(threads, self.counters)
        self._logical = address.logical
        self._parsed = ParsedGraphs(self.counters)
        self._graphs: ArtifactRuntime | None = None
        self.memory = RowMemory(self.counters, device)
        self._facts = DeviceFacts(
            device=address.name,
            logical=device.torch_name,
            binding="atom",
            versions={"torch": torch.__version__, DISTRIBUTION: package_version()},
            readback="unproven",
            execution="host-reference",
            test_options=(
                *([DUMMY] if rbln.is_dummy_device() else []),
                *([f"fault_file={fault_file}"] if fault_file else []),
            ),
        )

    @property
    def facts(self) -> DeviceFacts:
        """Compiled graphs run on the device; everything else on the host."""
        return replace(self._facts, execution="native") if self._graphs and self._graphs.live else self._facts

    def place(self, layout: Layout) -> Layout:
        if layout.artifact is not None and not rebel_sdk.installed():
            raise DeviceError(DeviceFault.UNSUPPORTED, "compiled graphs need rebel-compiler, which is not installed")
        return layout

    def prepare(
        self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...], given_up: Callable[[], bool] = never
    ) -> None:
        """Programs are not compiled here: they run on the host, or come compiled."""
        if layout.artifact is None:
            refuse_unfit(config, layout, self._limits, variants)

    def create_runtime(self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...] = ()) -> Runtime:
        del variants  # any shape runs at any time
        self._graphs = None
        if layout.artifact is not None:
            self._graphs = ArtifactRuntime(self._parsed, self.counters, layout.artifact, config, self._logical)
            return self._graphs
        runtime = HostReferenceRuntime.create(self.memory, self._threads, config, layout, self._limits)
        self.counters.program_loads += 1
        return runtime

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._parsed.close()
        self.memory.close()
