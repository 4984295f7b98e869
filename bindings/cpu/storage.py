"""Host memory as a device's storage."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.faults import FaultFile, with_faults
from rowlock.bindings.host_arena import HostArena
from rowlock.bindings.memory import Storage
from rowlock.bindings.model.layout import ParentInfo
from rowlock.bindings.weights import host_rows


class HostDevice:
    """Host memory, of which nothing has to be waited for: every copy has finished when it returns.

    See :class:`rowlock.bindings.memory.StorageDevice`.
    """

    name: Final = "cpu"

    def __init__(self, faults: FaultFile | None = None) -> None:
        self._faults = faults
        self._arena = HostArena()

    def create(self, parent: ParentInfo) -> Storage:
        return with_faults(HostStorage(parent, self._arena.take(parent)), self._faults)

    def fence(self) -> None:
        """Nothing to wait for."""

    def emptied(self) -> None:
        """Nothing is counted anywhere else."""
        self._arena.forget()

    def probe(self) -> None:
        """Host memory always answers."""


class HostStorage:
    """Our own memory, on the host."""

    def __init__(self, parent: ParentInfo, data: Bytes) -> None:
        self._bytes = data
        self.tensor = host_rows(parent, self._bytes)

    @property
    def address(self) -> int:
        return self.tensor.data_ptr()

    def write(self, offset: int, data: Bytes) -> None:
        np.copyto(self._bytes[offset : offset + data.nbytes], data)

    def read(self, offset: int, out: Bytes) -> None:
        np.copyto(out, self._bytes[offset : offset + out.nbytes])

    def view(self, offset: int, nbytes: int) -> Bytes:
        part = self._bytes[offset : offset + nbytes]
        part.flags.writeable = False
        return part

    def release(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self.tensor = torch.empty(0)
