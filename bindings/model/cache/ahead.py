"""The memory of pages, taken before they are used.

Memory that is asked for is there only once it is touched, and large pages of memory cost milliseconds each where a
hypervisor has to find them. A step that comes to new pages touches one in every layer: it would take as long as ten.
"""

from __future__ import annotations

import ctypes
import mmap
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.host_arena import LARGE_PAGE_BYTES

MADV_POPULATE_WRITE: Final = 23
"""madvise(2): have the pages there as if they were written to, and change nothing in them. Linux 5.14."""

_madvise: Final = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_madvise.restype = ctypes.c_int


class MemoryAhead:
    """Has the next pages' memory ready, one large page of memory in each layer ahead, on a thread of its own.

    Where the system cannot do that, each page costs its time when it is first written to. Owner thread only.

    Args:
        layers: the bytes of each layer's pages, one after the other.
        page_bytes: of one page in one layer.

    """

    def __init__(self, layers: list[Bytes], page_bytes: int) -> None:
        self._layers = layers
        self._page_bytes = page_bytes
        self._executor = ThreadPoolExecutor(1, "rowlock-pages")
        self._there = 0
        self.used(0)

    def used(self, pages: int) -> None:
        """Pages with numbers below this are used, or soon will be."""
        wanted = (-(-pages * self._page_bytes // LARGE_PAGE_BYTES) + 1) * LARGE_PAGE_BYTES
        if wanted > self._there:
            start, self._there = self._there, wanted
            self._executor.submit(_populate, [layer[start : self._there] for layer in self._layers])


def _populate(parts: list[Bytes]) -> None:
    for part in parts:
        start = part.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise(start, part.ctypes.data + part.nbytes - start, MADV_POPULATE_WRITE)
