"""Images that two processes see: an unnamed file in memory (memfd_create(2)), freed with its last holder."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from typing import Final, Self

import numpy as np

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.daemon.owner.images import buffer_bytes, cut

LOOK_BYTES: Final = 4 * 1024 * 1024
"""Bytes that are looked at in one call, one byte of each page: enough that numpy gives up the interpreter's lock."""


class SharedImages(dict[str, Bytes]):
    """Images by parent name, mapped into this process.

    Attributes:
        number: what both processes call them.

    """

    def __init__(self, number: int, images: Mapping[str, Bytes]) -> None:
        super().__init__(images)
        self.number = number

    @classmethod
    def attach(cls, number: int, descriptor: int, sizes: Mapping[str, int]) -> Self:
        """Map them; the descriptor stays the caller's."""
        mapping = mmap.mmap(descriptor, buffer_bytes(sizes))
        return cls(number, cut(np.frombuffer(mapping, np.uint8), sizes))

    def pieces(self) -> Iterator[Bytes]:
        """All of them, in pieces that take a fraction of a millisecond to be looked at."""
        for image in self.values():
            for start in range(0, image.nbytes, LOOK_BYTES):
                yield image[start : start + LOOK_BYTES]


def look_at_every_page(piece: Bytes) -> None:
    """Have every page of a piece in the page table of this process."""
    piece[:: mmap.PAGESIZE].max()


def new_memory(sizes: Mapping[str, int]) -> int:
    """A descriptor of memory for images of such sizes. No page of it is taken yet."""
    descriptor = os.memfd_create("rowlock-images", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, buffer_bytes(sizes))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
