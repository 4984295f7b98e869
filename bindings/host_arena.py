"""Host memory on the edges of pages; that for weights is cut from chunks that are large enough to get large ones."""

from __future__ import annotations

from typing import Final

import numpy as np

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.layout import ParentInfo

PAGE_BYTES: Final = 4096
LARGE_PAGE_BYTES: Final = 2 * 1024 * 1024
CHUNK_BYTES: Final = 64 * 1024 * 1024


class HostArena:
    """Our own anonymous memory: no mapping of any file.

    Numpy asks for large pages where an array is large. Most parents are not, so several lie in one array: a step that
    reads every weight then misses the TLB less often (10 to 20 % of its time), and a load faults in pages of 2 MiB.
    A chunk is freed with the last parent in it.
    """

    def __init__(self) -> None:
        self._rest: Bytes = np.empty(0, np.uint8)

    def take(self, parent: ParentInfo) -> Bytes:
        """Room for a parent, page-aligned, content undefined.

        Raises:
            DeviceError: OUT_OF_MEMORY.

        """
        room = -(-parent.nbytes // PAGE_BYTES) * PAGE_BYTES
        if room > self._rest.nbytes:
            try:
                self._rest = aligned_bytes(max(room, CHUNK_BYTES))
            except MemoryError as error:
                raise DeviceError(
                    DeviceFault.OUT_OF_MEMORY, f"{parent.name}: {parent.nbytes} bytes: {error}"
                ) from error
        taken, self._rest = self._rest[:room], self._rest[room:]
        return taken[: parent.nbytes]

    def forget(self) -> None:
        """Keep nothing for the next parent."""
        self._rest = np.empty(0, np.uint8)


def aligned_bytes(nbytes: int) -> Bytes:
    """Our own memory that begins on the edge of a page, of a large one if it fills one; content undefined.

    Large arrays of numpy begin 16 bytes behind an edge. Copies of 2 to 512 KiB to there from what begins on one take
    four times as long on processors whose ``rep movsb`` takes the two for overlapping: on AMD EPYC 2.7 GB/s for 10.
    """
    edge = LARGE_PAGE_BYTES if nbytes >= LARGE_PAGE_BYTES else PAGE_BYTES
    whole = np.empty(nbytes + edge, np.uint8)
    start = -whole.ctypes.data % edge
    return whole[start : start + nbytes]
