"""Host memory for weights, cut from chunks that are large enough to get large pages."""

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
                self._rest = _aligned(max(room, CHUNK_BYTES))
            except MemoryError as error:
                raise DeviceError(
                    DeviceFault.OUT_OF_MEMORY, f"{parent.name}: {parent.nbytes} bytes: {error}"
                ) from error
        taken, self._rest = self._rest[:room], self._rest[room:]
        return taken[: parent.nbytes]

    def forget(self) -> None:
        """Keep nothing for the next parent."""
        self._rest = np.empty(0, np.uint8)


def _aligned(nbytes: int) -> Bytes:
    whole = np.empty(nbytes + LARGE_PAGE_BYTES, np.uint8)
    start = -whole.ctypes.data % LARGE_PAGE_BYTES
    return whole[start : start + nbytes]
