"""The CUDA binding: torch on one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

import torch

from rowlock.bindings.address import DeviceAddress
from rowlock.bindings.cuda.storage import CudaDevice
from rowlock.bindings.device import Counters, DeviceFacts, DeviceFault, Variant, never
from rowlock.bindings.faults import FaultFile
from rowlock.bindings.memory import RowMemory
from rowlock.bindings.model.cache.fitting import refuse_unfit
from rowlock.bindings.model.cache.geometry import DEFAULT_LIMITS, CacheLimits
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.decoder import Decoder, Programs
from rowlock.bindings.model.layout import Layout
from rowlock.bindings.model.runtime import DecoderRuntime
from rowlock.bindings.vendor_errors import as_device_error

STEP_WIDTH: Final = 16
"""Host threads that a GPU is taken for, when a step's share of a prompt is chosen."""


class CudaProcessor:
    """The GPU's own products, in the order of one stream. See :class:`rowlock.bindings.model.runtime.Processor`."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def create_decoder(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Programs:
        return Decoder(config, weights)

    def prepare(self) -> int:
        return STEP_WIDTH

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self._device.torch_name)[0])

    @contextmanager
    def asked(self, what: str) -> Iterator[None]:
        """Whatever is asked of the device inside comes after everything before it, on the stream that is fenced."""
        with as_device_error(DeviceFault.LOST, what), torch.cuda.stream(self._device.stream):
            yield


class CudaRuntime(DecoderRuntime):
    """See :class:`rowlock.bindings.device.Runtime`."""

    _processor: CudaProcessor

    def asked(self, what: str) -> AbstractContextManager[None]:
        return self._processor.asked(what)


class CudaBinding:
    """See :class:`rowlock.bindings.device.Binding`. A readback comes from the memory that programs read.

    Args:
        address: the device.
        threads: of what is left to the host.
        limits: of the K/V cache.
        fault_file: test option, see :mod:`rowlock.bindings.faults`.

    Raises:
        DeviceError: the device cannot be opened.

    """

    def __init__(
        self,
        address: DeviceAddress,
        threads: int,
        fault_file: Path | None = None,
        limits: CacheLimits = DEFAULT_LIMITS,
    ) -> None:
        self._limits = limits
        torch.set_num_threads(threads)
        device = CudaDevice(address.logical, FaultFile(fault_file) if fault_file else None)
        self._processor = CudaProcessor(device)
        self.counters = Counters()
        self.memory = RowMemory(self.counters, device)
        self.facts = DeviceFacts(
            device=address.name,
            logical=device.torch_name,
            binding="cuda",
            versions={"torch": torch.__version__, "cuda": str(torch.version.cuda)},
            readback="storage",
            execution="native",
            imports=True,
            test_options=(f"fault_file={fault_file}",) if fault_file else (),
        )

    def place(self, layout: Layout) -> Layout:
        return layout

    def prepare(
        self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...], given_up: Callable[[], bool] = never
    ) -> None:
        """Programs are not compiled here."""
        refuse_unfit(config, layout, self._limits, variants)

    def create_runtime(self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...] = ()) -> CudaRuntime:
        del variants  # any shape runs at any time
        with self._processor.asked("making room for the model"):
            runtime = CudaRuntime.create(self.memory, self._processor, config, layout, self._limits)
        self.counters.program_loads += 1
        return runtime

    def close(self) -> None:
        self.memory.close()
