"""``DeviceMemory`` over storages, one per allocation: bounds, lives and counters, the same for every device."""

from __future__ import annotations

from itertools import count
from typing import Protocol

import torch

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.device import Allocation, Counters
from rowlock.bindings.model.layout import ParentInfo


class Storage(Protocol):
    """The bytes of one allocation. Offsets in bytes; every range lies inside."""

    @property
    def tensor(self) -> torch.Tensor:
        """``[rows, columns]`` over the very bytes that write changes."""
        ...

    @property
    def address(self) -> int:
        """Where it lies, for the device's library; the same for as long as it lives."""
        ...

    def write(self, offset: int, data: Bytes) -> None:
        """Start copying ``data`` to ``offset``; done, and seen by ``read``, after the device's next fence."""
        ...

    def read(self, offset: int, out: Bytes) -> None:
        """Copy from ``offset`` into ``out``, complete on return."""
        ...

    def view(self, offset: int, nbytes: int) -> Bytes | None:
        """The bytes where they lie, read-only; None: they are not in host memory."""
        ...

    def release(self) -> None: ...


class StorageDevice(Protocol):
    """What makes storages, and is shared by them. Raises DeviceError, and nothing else."""

    @property
    def name(self) -> str:
        """For allocation ids."""
        ...

    def create(self, parent: ParentInfo) -> Storage:
        """Raises DeviceError(OUT_OF_MEMORY) and leaves nothing behind when it does not fit."""
        ...

    def fence(self) -> None:
        """Return when every write has finished, or raise."""
        ...

    def emptied(self) -> None:
        """Told when the last live storage was released. Raises if the device still counts some of it."""
        ...

    def probe(self) -> None: ...


class RowMemory:
    """See :class:`rowlock.bindings.device.DeviceMemory`.

    Attributes:
        writes_total: how often anything was written: what was computed before the last write may be no more true.

    """

    def __init__(self, counters: Counters, device: StorageDevice) -> None:
        self._counters = counters
        self._device = device
        self._live: dict[str, Storage] = {}
        self._writes: dict[str, int] = {}
        self.writes_total = 0
        self._serial = count(1)

    def allocate(self, parent: ParentInfo) -> Allocation:
        storage = self._device.create(parent)
        allocation = Allocation(f"{self._device.name}-{next(self._serial)}@{storage.address:#x}", parent)
        self._live[allocation.id] = storage
        self._writes[allocation.id] = 0
        self._counters.allocations += 1
        self._counters.native_calls += 1
        return allocation

    def write_rows(self, allocation: Allocation, first_row: int, data: Bytes) -> None:
        storage = self._storage(allocation, first_row, data.nbytes)
        self._counters.native_calls += 1
        self._counters.bytes_written += data.nbytes
        self._writes[allocation.id] += 1
        self.writes_total += 1
        storage.write(first_row * allocation.parent.row_bytes, data)

    def read_rows(self, allocation: Allocation, first_row: int, out: Bytes) -> None:
        storage = self._storage(allocation, first_row, out.nbytes)
        self._counters.native_calls += 1
        self._counters.bytes_read_back += out.nbytes
        storage.read(first_row * allocation.parent.row_bytes, out)

    def view_rows(self, allocation: Allocation, first_row: int, rows: int) -> Bytes | None:
        row_bytes = allocation.parent.row_bytes
        storage = self._storage(allocation, first_row, rows * row_bytes)
        found = storage.view(first_row * row_bytes, rows * row_bytes)
        if found is not None:
            self._counters.native_calls += 1
            self._counters.bytes_read_back += found.nbytes
        return found

    def fence(self) -> None:
        self._counters.native_calls += 1
        self._device.fence()

    def release(self, allocation: Allocation) -> None:
        assert allocation.id in self._live, f"{allocation.id} is not live"
        self._counters.native_calls += 1
        self._end(allocation.id)

    def close(self) -> None:
        for key in list(self._live):
            self._end(key)

    def probe(self) -> None:
        self._device.probe()

    def writes(self, allocation: Allocation) -> int:
        """How often an allocation was written to: who keeps a copy knows by it when to read again."""
        return self._writes[allocation.id]

    def tensor(self, allocation: Allocation) -> torch.Tensor:
        """``[rows, columns]`` over the resident bytes, for the programs."""
        return self._live[allocation.id].tensor

    def _end(self, key: str) -> None:
        self._live[key].release()
        del self._live[key], self._writes[key]
        if not self._live:
            self._device.emptied()

    def _storage(self, allocation: Allocation, first_row: int, nbytes: int) -> Storage:
        assert allocation.id in self._live, f"{allocation.id} is not live"
        rows, rest = divmod(nbytes, allocation.parent.row_bytes)
        assert rest == 0, "not whole rows"
        assert 0 <= first_row <= allocation.parent.rows - rows, "rows out of bounds"
        return self._live[allocation.id]
