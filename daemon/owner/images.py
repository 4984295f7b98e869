"""Parent images in host memory, and the device calls that fill, write and compare them.

The calls are made on the owner thread only. What is read back is compared by other threads while the next piece is
read; where the device's memory is the host's, it is compared where it lies.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

import numpy as np

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.device import Allocation, DeviceMemory
from rowlock.bindings.host_arena import aligned_bytes
from rowlock.bindings.model.layout import Layout, ParentInfo, Placement
from rowlock.daemon.owner.record import RowRange

SLICE_BYTES: Final = 8 * 1024 * 1024
"""Device bytes read in one step of the owner thread at most, so that decoding goes on meanwhile."""
SLICE_S: Final = 0.002
"""Seconds after which such a step ends, whatever it has read: fresh memory can be slow to come by."""
READ_BYTES: Final = 512 * 1024
"""Device bytes of one read in such a step."""
COMPARE_BYTES: Final = 2 * 1024 * 1024
"""Bytes read back and compared at a time: small enough to stay in cache."""
VIEW_BYTES: Final = 16 * 1024 * 1024
"""Bytes compared at a time where they lie: a few ms, and so many that asking for them costs nothing."""
ALIGNMENT: Final = 64
"""Bytes: parents begin on cache lines of their own."""
SCRATCH_BUFFERS: Final = 3
"""One is filled while others are compared."""

Images = Mapping[str, Bytes]
"""Bytes of whole parents, by parent name."""


def new_images(layout: Layout, parents: Iterable[str], *, sparse: bool = False) -> dict[str, Bytes]:
    """Buffers for whole parents, content undefined. They are cut from one.

    Args:
        layout: of the model.
        parents: by name.
        sparse: only parts will be touched, and shall cost memory. Otherwise pages are as large as they come: a fault
            for each 4 KiB costs as much as the copy that makes it.

    """
    sizes = image_sizes(layout, parents)
    nbytes = buffer_bytes(sizes)
    return cut(np.frombuffer(mmap.mmap(-1, nbytes), np.uint8) if sparse else aligned_bytes(nbytes), sizes)


def image_sizes(layout: Layout, parents: Iterable[str]) -> dict[str, int]:
    """Bytes of the image of each parent, by name."""
    return {name: layout.parents[name].nbytes for name in parents}


def buffer_bytes(sizes: Mapping[str, int]) -> int:
    """Size of the buffer that images of such sizes are cut from; never 0."""
    return max(sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values()), 1)


def cut(buffer: Bytes, sizes: Mapping[str, int]) -> dict[str, Bytes]:
    """Images of such sizes, one after the other in a buffer."""
    images, start = {}, 0
    for name, size in sizes.items():
        images[name] = buffer[start : start + size]
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return images


def tensor_bytes(images: Images, placement: Placement) -> Bytes:
    """The part of a parent's image that is one tensor."""
    return images[placement.parent][placement.offset : placement.offset + placement.tensor.nbytes]


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a parent."""

    parent: str
    first_row: int
    rows: int


def whole_parents(allocations: Mapping[str, Allocation], parents: Iterable[str], nbytes: int) -> Iterator[Piece]:
    """All rows of some parents, in pieces of about ``nbytes``."""
    for name in parents:
        for first, rows in row_slices(allocations[name].parent, nbytes):
            yield Piece(name, first, rows)


def pieces_of(ranges: Iterable[RowRange], nbytes: int) -> Iterator[Piece]:
    """The rows of some ranges, in pieces of about ``nbytes``."""
    for item in ranges:
        step = max(nbytes * item.rows // max(item.bytes, 1), 1)
        for first in range(0, item.rows, step):
            yield Piece(item.parent, item.first_row + first, min(step, item.rows - first))


def row_slices(parent: ParentInfo, nbytes: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) pieces of a parent of about ``nbytes`` each."""
    step = max(nbytes // max(parent.row_bytes, 1), 1)
    for first in range(0, parent.rows, step):
        yield first, min(step, parent.rows - first)


class StepBudget:
    """Bounds one step of the owner thread, in device bytes and, beside decoding, in time, however small the pieces are.

    Args:
        monotonic: seconds.
        decoding: whether requests run just now.

    """

    def __init__(self, monotonic: Callable[[], float], decoding: Callable[[], bool]) -> None:
        self._monotonic = monotonic
        self._decoding = decoding
        self._left = SLICE_BYTES
        self._since: float | None = None

    def spend(self, nbytes: int) -> bool:
        """Whether it is time to give way, after a piece of so many bytes."""
        now = self._monotonic()
        self._since = now if self._since is None else self._since
        self._left -= nbytes
        if self._left > 0 and (now - self._since < SLICE_S or not self._decoding()):
            return False
        self._left, self._since = SLICE_BYTES, None
        return True


def read_slices(memory: DeviceMemory, allocation: Allocation, image: Bytes, budget: StepBudget) -> Iterator[None]:
    """Read a whole parent from the device into its image; yields whenever the budget of a step is spent."""
    row_bytes = allocation.parent.row_bytes
    for first, rows in row_slices(allocation.parent, READ_BYTES):
        memory.read_rows(allocation, first, image[first * row_bytes : (first + rows) * row_bytes])
        if budget.spend(rows * row_bytes):
            yield


def write_ranges(
    memory: DeviceMemory, allocations: Mapping[str, Allocation], images: Images, ranges: Iterable[RowRange]
) -> None:
    """Start writing rows of images to the device."""
    for item in ranges:
        data = images[item.parent][item.offset_bytes : item.offset_bytes + item.bytes]
        memory.write_rows(allocations[item.parent], item.first_row, data)


class Comparer:
    """Compares what is read back, through buffers that are made and touched once.

    Args:
        executor: compares while the next piece is read; None where the device's memory is the host's: it is compared
            where it lies, which takes half as long as copying it and comparing the copy.

    Attributes:
        piece_bytes: to compare at a time.

    """

    def __init__(self, executor: Executor | None) -> None:
        self.executor = executor
        self.piece_bytes = COMPARE_BYTES if executor else VIEW_BYTES
        self.buffers = deque(np.ones(COMPARE_BYTES, np.uint8) for _ in range(SCRATCH_BUFFERS if executor else 0))


def first_mismatch(
    memory: DeviceMemory, allocations: Mapping[str, Allocation], images: Images, pieces: Iterable[Piece],
    comparer: Comparer,
) -> tuple[str, int] | None:  # fmt: skip
    """Read pieces back and compare them with their images: the first (parent, row) that differs, or None."""
    if comparer.executor is None:
        return _compare_in_place(memory, allocations, images, pieces)
    return _compare_beside(memory, allocations, images, pieces, comparer.executor, comparer.buffers.copy())


def _compare_in_place(
    memory: DeviceMemory, allocations: Mapping[str, Allocation], images: Images, pieces: Iterable[Piece]
) -> tuple[str, int] | None:
    for piece in pieces:
        got = memory.view_rows(allocations[piece.parent], piece.first_row, piece.rows)
        want = rows_of(images, piece, allocations)
        assert got is not None, "the device's memory is the host's"
        assert not np.may_share_memory(got, want), "an image is no proof of itself"
        if not _equal(got, want):
            return _first_wrong(piece, got, want)
    return None


def _compare_beside(
    memory: DeviceMemory, allocations: Mapping[str, Allocation], images: Images, pieces: Iterable[Piece],
    executor: Executor, buffers: deque[Bytes],
) -> tuple[str, int] | None:  # fmt: skip
    """Copy pieces into other memory, and compare them on other threads while the next one is read."""
    running: deque[tuple[Piece, Bytes, Bytes, Future[bool]]] = deque()

    def finish() -> tuple[str, int] | None:
        piece, got, want, equal = running.popleft()
        if not equal.result():
            return _first_wrong(piece, got, want)
        buffers.append(_whole(got))
        return None

    try:
        for piece in pieces:
            if not buffers and (wrong := finish()) is not None:
                return wrong
            got = _fitting(buffers, piece.rows * allocations[piece.parent].parent.row_bytes)
            want = _read_back(memory, allocations, images, piece, got)
            running.append((piece, got, want, executor.submit(_equal, got, want)))
        while running:
            if (wrong := finish()) is not None:
                return wrong
    finally:
        concurrent.futures.wait([future for *_, future in running])  # the buffers are used again
    return None


def _read_back(
    memory: DeviceMemory, allocations: Mapping[str, Allocation], images: Images, piece: Piece, got: Bytes
) -> Bytes:
    """Fill ``got`` from the device, and return what it should be."""
    memory.read_rows(allocations[piece.parent], piece.first_row, got)
    return rows_of(images, piece, allocations)


def _first_wrong(piece: Piece, got: Bytes, want: Bytes) -> tuple[str, int]:
    wrong = (got != want).reshape(piece.rows, -1).any(axis=1)
    return piece.parent, piece.first_row + int(wrong.argmax())


def _fitting(buffers: deque[Bytes], nbytes: int) -> Bytes:
    buffer = buffers.popleft()
    if buffer.nbytes < nbytes:
        buffer = np.empty(max(nbytes, COMPARE_BYTES), np.uint8)
    return buffer[:nbytes]


def _whole(part: Bytes) -> Bytes:
    """The buffer that a part was cut from."""
    return part.base if part.base is not None else part


def rows_of(images: Images, piece: Piece, allocations: Mapping[str, Allocation]) -> Bytes:
    """The part of a parent's image that is a piece of it."""
    row_bytes = allocations[piece.parent].parent.row_bytes
    return images[piece.parent][piece.first_row * row_bytes : (piece.first_row + piece.rows) * row_bytes]


_memcmp: Final = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memcmp.restype = ctypes.c_int


def _equal(left: Bytes, right: Bytes) -> bool:
    """Whether two contiguous buffers hold the same bytes; needs no temporary memory, and not the GIL."""
    assert left.nbytes == right.nbytes
    assert left.flags.c_contiguous
    assert right.flags.c_contiguous
    return bool(_memcmp(left.ctypes.data, right.ctypes.data, left.nbytes) == 0)
