"""Tensors of an engine as storage: rows are written by slice and copy, the vendor's public way."""

from __future__ import annotations

from typing import Final

import torch

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.faults import FaultFile, with_faults
from rowlock.bindings.memory import Storage
from rowlock.bindings.model.layout import ParentInfo
from rowlock.bindings.rngd import sdk
from rowlock.bindings.rngd.engine import Engine
from rowlock.bindings.weights import host_rows, weight_dtype


class RngdDevice:
    """Makes the storages of one engine. See :class:`rowlock.bindings.memory.StorageDevice`."""

    name: Final = "rngd"

    def __init__(self, engine: Engine, faults: FaultFile | None = None) -> None:
        self._engine = engine
        self._faults = faults

    def create(self, parent: ParentInfo) -> Storage:
        return with_faults(RngdStorage(self._engine, parent), self._faults)

    def fence(self) -> None:
        self._engine.fence()

    def emptied(self) -> None:
        """furiosa-torch counts no memory that could be asked for."""

    def probe(self) -> None:
        self._engine.probe()


class RngdStorage:
    """One tensor. Whole rows of its own dtype are copied, never converted: a pure transfer.

    See :class:`rowlock.bindings.memory.Storage`.
    """

    def __init__(self, engine: Engine, parent: ParentInfo) -> None:
        self._parent = parent
        dtype = weight_dtype(parent)
        shape = (parent.rows, parent.row_bytes // dtype.itemsize)
        try:
            self.tensor = torch.empty(shape, dtype=dtype, device=engine.torch_device)
        except RuntimeError as error:
            engine.probe()  # without a card the library speaks of memory, too
            what = f"{parent.name}: {parent.nbytes} bytes: {error}"
            raise DeviceError(DeviceFault.OUT_OF_MEMORY, what) from error.with_traceback(None)
        self.address = self.tensor.data_ptr()

    def write(self, offset: int, data: Bytes) -> None:
        host = host_rows(self._parent, data)
        with sdk.vendor_errors(f"writing {len(host)} rows of {self._parent.name}"):
            self._rows(offset, len(host)).copy_(host)

    def read(self, offset: int, out: Bytes) -> None:
        host = host_rows(self._parent, out)
        with sdk.vendor_errors(f"reading {len(host)} rows of {self._parent.name}"):
            host.copy_(self._rows(offset, len(host)))

    def view(self, offset: int, nbytes: int) -> None:
        """It is not host memory."""

    def release(self) -> None:
        """The library frees a tensor with its last reference, which is this one: programs take theirs per call."""
        self.tensor = torch.empty(0)

    def _rows(self, offset: int, rows: int) -> torch.Tensor:
        first_row = offset // self._parent.row_bytes
        return self.tensor[first_row : first_row + rows]
