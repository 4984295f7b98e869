"""``DeviceMemory`` over host storage."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.cpu.storage import Storage
from rowlock.bindings.device import Allocation, Counters
from rowlock.bindings.model.layout import ParentInfo


class CpuMemory:
    """Host memory behind the device interface; see :class:`rowlock.bindings.device.DeviceMemory`."""

    def __init__(self, counters: Counters, create_storage: Callable[[ParentInfo], Storage]) -> None:
        self._counters = counters
        self._create_storage = create_storage
        self._live: dict[str, Storage] = {}
        self._serial = count(1)

    def allocate(self, parent: ParentInfo) -> Allocation:
        storage = self._create_storage(parent)
        allocation = Allocation(f"cpu-{next(self._serial)}@{storage.tensor.data_ptr():#x}", parent)
        self._live[allocation.id] = storage
        self._counters.allocations += 1
        self._counters.native_calls += 1
        return allocation

    def write_rows(self, allocation: Allocation, first_row: int, data: Bytes) -> None:
        storage = self._storage(allocation, first_row, data)
        self._counters.native_calls += 1
        self._counters.bytes_written += data.nbytes
        storage.write(first_row * allocation.parent.row_bytes, data)

    def read_rows(self, allocation: Allocation, first_row: int, out: Bytes) -> None:
        storage = self._storage(allocation, first_row, out)
        self._counters.native_calls += 1
        self._counters.bytes_read_back += out.nbytes
        storage.read(first_row * allocation.parent.row_bytes, out)

    def fence(self) -> None:
        """Nothing to wait for: every copy has finished when it returns."""
        self._counters.native_calls += 1

    def release(self, allocation: Allocation) -> None:
        assert allocation.id in self._live, f"{allocation.id} is not live"
        self._live[allocation.id].release()
        del self._live[allocation.id]
        self._counters.native_calls += 1

    def close(self) -> None:
        for key in list(self._live):
            self._live[key].release()
            del self._live[key]

    def probe(self) -> None:
        """Host memory always answers."""

    def tensor(self, allocation: Allocation) -> torch.Tensor:
        """``[rows, columns]`` over the resident bytes, for the programs."""
        return self._live[allocation.id].tensor

    def _storage(self, allocation: Allocation, first_row: int, data: Bytes) -> Storage:
        assert allocation.id in self._live, f"{allocation.id} is not live"
        rows, rest = divmod(data.nbytes, allocation.parent.row_bytes)
        assert rest == 0, "not whole rows"
        assert 0 <= first_row <= allocation.parent.rows - rows, "rows out of bounds"
        return self._live[allocation.id]
