"""Memory of one GPU as storage: one stream for copies and programs, in order, and events as fences."""

from __future__ import annotations

from typing import Final

import torch

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.cuda.staging import STAGING_BUFFERS, STAGING_BYTES, Staging
from rowlock.bindings.device import DeviceFault
from rowlock.bindings.faults import FaultFile, with_faults
from rowlock.bindings.memory import Storage
from rowlock.bindings.model.layout import ParentInfo
from rowlock.bindings.vendor_errors import as_device_error
from rowlock.bindings.weights import weight_dtype


class CudaDevice:
    """See :class:`rowlock.bindings.memory.StorageDevice`.

    Attributes:
        torch_name: e.g. ``cuda:0``.
        stream: of everything that this binding asks of the device.

    """

    name: Final = "cuda"

    def __init__(self, logical: int, faults: FaultFile | None = None) -> None:
        self._faults = faults
        self.torch_name = f"cuda:{logical}"
        with as_device_error(DeviceFault.LOST, f"opening {self.torch_name}"):
            self.stream: torch.cuda.Stream = torch.cuda.Stream(self.torch_name)
            self.staging = Staging(
                torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(STAGING_BUFFERS)
            )

    def create(self, parent: ParentInfo) -> Storage:
        return with_faults(CudaStorage(self, parent), self._faults)

    def fence(self) -> None:
        with as_device_error(DeviceFault.LOST, "waiting for the stream"):
            self.record().synchronize()

    def record(self) -> torch.cuda.Event:
        """Happens when the stream has done everything asked of it so far."""
        event: torch.cuda.Event = self.stream.record_event()
        return event

    def emptied(self) -> None:
        """What was freed goes back to the device, not only to torch's cache."""
        with as_device_error(DeviceFault.LOST, "giving memory back"):
            torch.cuda.empty_cache()

    def probe(self) -> None:
        self.fence()

    def memory(self) -> str:
        """Bytes free and there, and what torch holds, for messages."""
        free, total = torch.cuda.mem_get_info(self.torch_name)
        held = torch.cuda.memory_allocated(self.torch_name)
        return f"{free} of {total} bytes are free, {held} are held by this process"


class CudaStorage:
    """One tensor of device memory. See :class:`rowlock.bindings.memory.Storage`."""

    def __init__(self, device: CudaDevice, parent: ParentInfo) -> None:
        dtype = weight_dtype(parent)
        self._device = device
        self._name = parent.name
        with as_device_error(DeviceFault.LOST, "asking for free memory"):
            what = f"{parent.name}: {parent.nbytes} bytes; {device.memory()}"
        with as_device_error(DeviceFault.OUT_OF_MEMORY, what), torch.cuda.stream(device.stream):
            self.tensor = torch.empty(
                parent.rows, parent.row_bytes // dtype.itemsize, dtype=dtype, device=device.torch_name
            )
        self._bytes = self.tensor.view(-1).view(torch.uint8)
        self.address = self.tensor.data_ptr()

    def write(self, offset: int, data: Bytes) -> None:
        def start(at: int, piece: torch.Tensor) -> torch.cuda.Event:
            begin = offset + at
            self._bytes[begin : begin + len(piece)].copy_(piece, non_blocking=True)
            return self._device.record()

        with as_device_error(DeviceFault.LOST, f"writing to {self._name}"), torch.cuda.stream(self._device.stream):
            self._device.staging.send(data, start)

    def read(self, offset: int, out: Bytes) -> None:
        def start(at: int, piece: torch.Tensor) -> torch.cuda.Event:
            begin = offset + at
            piece.copy_(self._bytes[begin : begin + len(piece)], non_blocking=True)
            return self._device.record()

        with as_device_error(DeviceFault.LOST, f"reading {self._name}"), torch.cuda.stream(self._device.stream):
            self._device.staging.receive(out, start)

    def view(self, offset: int, nbytes: int) -> None:
        """It is not host memory."""

    def release(self) -> None:
        self.tensor = self._bytes = torch.empty(0)
