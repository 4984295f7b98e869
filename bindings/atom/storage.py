"""torch-rbln device tensors as storage.

Whole rows of a contiguous tensor are contiguous, so a write is one host-to-device copy of exactly
those bytes; a part of a row would be read, modified and written back by the vendor's
runtime, which is not atomic, and never happens here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from rowlock.bindings.atom.sdk import RblnModule
from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.faults import FaultFile, with_faults
from rowlock.bindings.memory import Storage
from rowlock.bindings.model.layout import ParentInfo
from rowlock.bindings.vendor_errors import as_device_error
from rowlock.bindings.weights import host_rows, weight_dtype

BATCH_RANGES_MAX: Final = 1024
"""Runs of rows that are handed to torch-rbln at a time."""
BATCH_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes from which they are handed over without waiting for more: one call has a deadline."""


@dataclass(frozen=True)
class _Write:
    storage: RblnStorage
    first_row: int
    source: torch.Tensor


class RblnDevice:
    """One ATOM device. See :class:`rowlock.bindings.memory.StorageDevice`.

    Writes are gathered until the fence, and then handed over in as few calls as order allows.
    """

    name: Final = "rbln"

    def __init__(self, rbln: RblnModule, logical: int, faults: FaultFile | None = None) -> None:
        self.logical = logical
        self._rbln = rbln
        self._faults = faults
        self._pending: list[_Write] = []
        self._pending_bytes = 0
        self._ends: dict[RblnStorage, int] = {}
        with as_device_error(DeviceFault.LOST, "counting what is allocated"):
            self._allocated_before = rbln.memory_allocated(logical)

    @property
    def torch_name(self) -> str:
        return f"rbln:{self.logical}"

    def create(self, parent: ParentInfo) -> Storage:
        return with_faults(RblnStorage(self, parent), self._faults)

    def gather(self, storage: RblnStorage, first_row: int, source: torch.Tensor) -> None:
        """Keep a write until the next fence, or until there are enough; what may overlap is never in one call."""
        full = len(self._pending) == BATCH_RANGES_MAX or self._pending_bytes >= BATCH_BYTES_MAX
        if full or first_row < self._ends.get(storage, 0):
            self._submit()
        self._pending.append(_Write(storage, first_row, source))
        self._pending_bytes += source.nbytes
        self._ends[storage] = first_row + len(source)

    def forget(self, storage: RblnStorage) -> None:
        """Drop writes to a storage that is being released."""
        self._pending = [write for write in self._pending if write.storage is not storage]
        self._ends.pop(storage, None)

    def fence(self) -> None:
        self._submit()
        with as_device_error(DeviceFault.LOST, "synchronise"):
            self._rbln.synchronize(self.logical)

    def emptied(self) -> None:
        """A free that fails is swallowed by the vendor's deleter; what it still counts tells."""
        with as_device_error(DeviceFault.LOST, "counting what is allocated"):
            left = self._rbln.memory_allocated(self.logical) - self._allocated_before
        if left > 0:
            raise DeviceError(DeviceFault.LOST, f"everything was freed, but the runtime still counts {left} bytes")

    def probe(self) -> None:
        if not self._rbln.is_available():
            raise DeviceError(DeviceFault.LOST, f"{self.torch_name} is not available")
        with as_device_error(DeviceFault.LOST, "synchronise"):
            self._rbln.synchronize(self.logical)

    def _submit(self) -> None:
        """One call for all that is pending; torch-rbln makes one multi-copy of it."""
        writes, self._pending, self._pending_bytes = self._pending, [], 0
        self._ends.clear()
        if not writes:
            return
        destinations = [item.storage.rows(item.first_row, len(item.source)) for item in writes]
        try:
            with as_device_error(DeviceFault.LOST, f"copying {len(writes)} runs of rows to the device"):
                torch._foreach_copy_(destinations, [item.source for item in writes])
        finally:
            destinations.clear()  # views keep their storage alive, and a frame may live on in an error


class RblnStorage:
    """One device tensor. See :class:`rowlock.bindings.memory.Storage`."""

    def __init__(self, device: RblnDevice, parent: ParentInfo) -> None:
        dtype = weight_dtype(parent)
        self._device = device
        self._parent = parent
        with as_device_error(DeviceFault.OUT_OF_MEMORY, f"{parent.name}: {parent.nbytes} bytes"):
            self.tensor = torch.empty(
                parent.rows, parent.row_bytes // dtype.itemsize, dtype=dtype, device=device.torch_name
            )
        assert self.tensor.is_contiguous()
        self.address = self.tensor.data_ptr()

    def rows(self, first_row: int, rows: int) -> torch.Tensor:
        """A view of whole rows."""
        return self.tensor[first_row : first_row + rows]

    def write(self, offset: int, data: Bytes) -> None:
        self._device.gather(self, offset // self._parent.row_bytes, host_rows(self._parent, data))

    def read(self, offset: int, out: Bytes) -> None:
        host = host_rows(self._parent, out)
        first_row = offset // self._parent.row_bytes
        with as_device_error(DeviceFault.LOST, f"reading {len(host)} rows of {self._parent.name}"):
            host.copy_(self.rows(first_row, len(host)))

    def view(self, offset: int, nbytes: int) -> None:
        """It is not host memory."""

    def release(self) -> None:
        self._device.forget(self)
        self.tensor = torch.empty(0)
