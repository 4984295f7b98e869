"""Parent images in host memory, and the device calls that fill, write and compare them.

The calls are made on the owner thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np

from rowlock.bindings.checkpoint.directory import Bytes
from rowlock.bindings.device import Allocation, DeviceMemory
from rowlock.bindings.model.layout import Layout, ParentInfo, Placement
from rowlock.daemon.owner.record import RowRange

SLICE_BYTES: Final = 8 * 1024 * 1024
"""Device bytes read in one step of the owner thread, so that decoding goes on meanwhile."""
COMPARE_BYTES: Final = 1024 * 1024
"""Bytes read back and compared at a time: small enough to stay in cache."""

Images = Mapping[str, Bytes]
"""Bytes of whole parents, by parent name."""


def new_images(layout: Layout, parents: Iterable[str]) -> dict[str, Bytes]:
    """Buffers for whole parents, content undefined."""
    return {name: np.empty(layout.parents[name].nbytes, np.uint8) for name in parents}


def tensor_bytes(images: Images, placement: Placement) -> Bytes:
    """The part of a parent's image that is one tensor."""
    return images[placement.parent][placement.offset : placement.offset + placement.tensor.nbytes]


def word_of(nbytes: int) -> type[np.unsignedinteger]:
    """The widest integer that divides a size: bytes are compared as integers, never as floats."""
    for word, size in ((np.uint64, 8), (np.uint32, 4), (np.uint16, 2)):
        if nbytes % size == 0:
            return word
    return np.uint8


def read_slices(memory: DeviceMemory, allocations: Mapping[str, Allocation], images: Images) -> Iterator[None]:
    """Read whole parents from the device into images, a bounded slice at each step."""
    for name, image in images.items():
        allocation = allocations[name]
        for first, rows in row_slices(allocation.parent, SLICE_BYTES):
            row_bytes = allocation.parent.row_bytes
            memory.read_rows(allocation, first, image[first * row_bytes : (first + rows) * row_bytes])
            yield


def write_ranges(
    memory: DeviceMemory, allocations: Mapping[str, Allocation], images: Images, ranges: Iterable[RowRange]
) -> None:
    """Start writing rows of images to the device."""
    for item in ranges:
        data = images[item.parent][item.offset_bytes : item.offset_bytes + item.bytes]
        memory.write_rows(allocations[item.parent], item.first_row, data)


def resident_mismatch(
    memory: DeviceMemory, allocations: Mapping[str, Allocation], images: Images
) -> tuple[str, int] | None:
    """Read whole parents back and compare integers: the first (parent, row) that differs, or None."""
    widest = max((allocations[name].parent.row_bytes for name in images), default=0)
    scratch = np.empty(max(COMPARE_BYTES, widest), np.uint8)
    for name, image in images.items():
        allocation = allocations[name]
        row_bytes = allocation.parent.row_bytes
        word = word_of(row_bytes)
        for first, rows in row_slices(allocation.parent, COMPARE_BYTES):
            got = scratch[: rows * row_bytes]
            memory.read_rows(allocation, first, got)
            want = image[first * row_bytes : (first + rows) * row_bytes]
            if not np.array_equal(got.view(word), want.view(word)):
                wrong = (got != want).reshape(rows, row_bytes).any(axis=1)
                return name, first + int(wrong.argmax())
    return None


def row_slices(parent: ParentInfo, nbytes: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) pieces of a parent of about ``nbytes`` each."""
    step = max(nbytes // max(parent.row_bytes, 1), 1)
    for first in range(0, parent.rows, step):
        yield first, min(step, parent.rows - first)
