"""The memory of K/V pages is there before they are used, and nothing in it changes by that."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from rowlock.bindings.host_arena import LARGE_PAGE_BYTES
from rowlock.bindings.model.cache.ahead import MemoryAhead

PAGE_BYTES = 48 * 1024
PAGES = 256  # of which the first large pages of memory hold 42 each


def layer() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Memory that nobody has touched."""
    return np.frombuffer(mmap.mmap(-1, PAGES * PAGE_BYTES), np.uint8)


def there(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """Bytes up to the first page that is not in memory."""
    pages = (ctypes.c_ubyte * -(-data.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(data.nbytes), pages) == 0
    resident = np.frombuffer(pages, np.uint8) & 1
    return (int(resident.argmin()) if not resident.all() else len(resident)) * mmap.PAGESIZE


def wait(ahead: MemoryAhead) -> None:
    ahead._executor.submit(int).result(30)


def test_every_layer_is_one_large_page_ahead() -> None:
    layers = [layer() for _ in range(3)]
    ahead = MemoryAhead(layers, PAGE_BYTES)
    for used in (0, 1, 40, 100, 101, PAGES):
        ahead.used(used)
        wait(ahead)
        for data in layers:
            assert there(data) >= min(used * PAGE_BYTES + LARGE_PAGE_BYTES, data.nbytes)
            assert there(data) <= used * PAGE_BYTES + 4 * LARGE_PAGE_BYTES, "far more than will be used soon"


def test_what_is_written_meanwhile_stays() -> None:
    data = layer()
    for page in range(PAGES):
        data[page * PAGE_BYTES] = page % 251 + 1
    ahead = MemoryAhead([data], PAGE_BYTES)
    ahead.used(PAGES)
    wait(ahead)
    assert (data[::PAGE_BYTES] == np.arange(PAGES) % 251 + 1).all()


def test_a_pool_smaller_than_a_large_page_is_there_at_once() -> None:
    data = np.frombuffer(mmap.mmap(-1, 3 * mmap.PAGESIZE), np.uint8)
    ahead = MemoryAhead([data], mmap.PAGESIZE)
    wait(ahead)
    assert there(data) == data.nbytes
