"""Pinned host buffers that writes go through.

The device copies from a buffer while the next one is filled; a buffer is filled again only when
the copy out of it has ended::

    data ──memcpy──> buffer 0 ──DMA──> device
         ──memcpy──> buffer 1 ──DMA──>
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

import numpy as np
import torch

from rowlock.bindings.checkpoint.tensors import Bytes

STAGING_BYTES: Final = 8 * 1024 * 1024
"""Size of one buffer."""
STAGING_BUFFERS: Final = 2


class Ended(Protocol):
    """Tells when a copy has ended."""

    def synchronize(self) -> None:
        """Wait for it."""
        ...


class Staging:
    """Buffers used in turn. Owner thread only.

    Args:
        buffers: ``uint8`` tensors in host memory, all of one size.

    """

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._ring: list[tuple[torch.Tensor, Ended | None]] = [(buffer, None) for buffer in buffers]

    def send(self, data: Bytes, start: Callable[[int, torch.Tensor], Ended]) -> None:
        """Copy ``data``, in pieces, out of the caller's hands.

        Args:
            data: may change when this returns.
            start: starts the device's copy of a piece, which belongs at this offset of the data.

        """
        size = len(self._ring[0][0])
        for offset in range(0, data.nbytes, size):
            buffer, busy = self._ring.pop(0)
            if busy is not None:
                busy.synchronize()
            piece = buffer[: min(size, data.nbytes - offset)]
            np.copyto(piece.numpy(), data[offset : offset + len(piece)])
            self._ring.append((buffer, start(offset, piece)))

    def receive(self, out: Bytes, start: Callable[[int, torch.Tensor], Ended]) -> None:
        """Fill ``out``, in pieces; complete on return.

        Args:
            out: where to.
            start: starts the device's copy into a piece, from this offset of what is read.

        """
        size = len(self._ring[0][0])
        for offset in range(0, out.nbytes, size):
            buffer, busy = self._ring.pop(0)
            if busy is not None:
                busy.synchronize()
            piece = buffer[: min(size, out.nbytes - offset)]
            ended = start(offset, piece)
            ended.synchronize()
            np.copyto(out[offset : offset + len(piece)], piece.numpy())
            self._ring.append((buffer, None))
