"""Memory for weights: every parent has its own, and a chunk goes when its last parent goes."""

from __future__ import annotations

import weakref
from itertools import pairwise

import numpy as np
import pytest

from rowlock.bindings import host_arena
from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.host_arena import CHUNK_BYTES, LARGE_PAGE_BYTES, PAGE_BYTES, HostArena, aligned_bytes
from rowlock.bindings.model.layout import ParentInfo


def parent(nbytes: int, name: str = "p") -> ParentInfo:
    return ParentInfo(name, "BF16", nbytes // 2, 2)


def test_parents_are_page_aligned_and_share_no_byte() -> None:
    arena = HostArena()
    sizes = [2, PAGE_BYTES, PAGE_BYTES + 2, CHUNK_BYTES // 2, CHUNK_BYTES // 2, CHUNK_BYTES + 2, 6]
    taken = [arena.take(parent(size)) for size in sizes]
    assert [data.nbytes for data in taken] == sizes
    assert all(data.ctypes.data % PAGE_BYTES == 0 for data in taken)
    spans = sorted((data.ctypes.data, data.ctypes.data + data.nbytes) for data in taken)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))


@pytest.mark.parametrize(
    ("nbytes", "edge"),
    [(0, 1), (1, PAGE_BYTES), (LARGE_PAGE_BYTES - 1, PAGE_BYTES), (LARGE_PAGE_BYTES, LARGE_PAGE_BYTES)],
)
def test_memory_begins_on_the_edge_of_a_page(nbytes: int, edge: int) -> None:
    data = aligned_bytes(nbytes)
    assert data.nbytes == nbytes
    assert data.ctypes.data % edge == 0


def test_small_parents_share_a_chunk() -> None:
    arena = HostArena()
    first, second = arena.take(parent(PAGE_BYTES)), arena.take(parent(PAGE_BYTES))
    assert second.ctypes.data == first.ctypes.data + PAGE_BYTES


def test_a_chunk_is_freed_with_its_last_parent() -> None:
    arena = HostArena()
    first, second = arena.take(parent(8)), arena.take(parent(8))
    chunk = first.base
    assert isinstance(chunk, np.ndarray)
    gone = weakref.ref(chunk)
    arena.forget()
    del chunk, first
    assert gone() is not None
    del second
    assert gone() is None


def test_no_memory_is_a_device_error_that_names_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_nbytes: int) -> None:
        raise MemoryError("no room")

    arena = HostArena()
    kept = arena.take(parent(PAGE_BYTES))
    monkeypatch.setattr(host_arena, "aligned_bytes", refuse)
    with pytest.raises(DeviceError, match=r"big: 134217728 bytes: no room") as caught:
        arena.take(parent(2 * CHUNK_BYTES, "big"))
    assert caught.value.fault is DeviceFault.OUT_OF_MEMORY
    after = arena.take(parent(PAGE_BYTES))
    assert after.ctypes.data == kept.ctypes.data + PAGE_BYTES
