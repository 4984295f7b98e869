"""Pages for K/V that somebody else computes: nobody sees them before all of it is there.

::

    reserve ──> write, write, ... ──> admit       the table is a sequence whose prompt is computed
                                 ├──> release     the pages can be used again
                                 └──> quarantine  a copy may still be writing: they are never used again
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rowlock.bindings.model.cache.paged import PagedCache
from rowlock.bindings.model.cache.table import BlockTable
from rowlock.bindings.model.cache.transfer import copy_in


class Reservation:
    """Private pages for the K/V of one prompt.

    Its table is nobody's, and no page of it is kept for other prompts, until it is admitted. What is known of the
    prompt is taken over and not written again: K/V is wanted from ``first`` on only.

    Args:
        cache: whose pages it takes.
        prompt: tokens, int64.
        capacity: tokens that the sequence may grow to.
        settled: see :meth:`BlockTable.begin`.

    Attributes:
        prompt: its tokens.
        first: the first position that K/V is wanted of.

    Raises:
        PagesShortError: there are not enough pages now. It holds none then.

    """

    def __init__(self, cache: PagedCache, prompt: NDArray[np.int64], capacity: int, settled: int) -> None:
        table = BlockTable(cache, capacity)
        self._table: BlockTable | None = table
        self.prompt = prompt
        try:
            table.begin(prompt, settled)
            self.first = table.length
            table.reserve_whole(len(prompt))
        except BaseException:
            table.close()
            raise

    def wanted(self, layer: int) -> range:
        """The positions of a layer that K/V is wanted of: of a layer with a window, what the next token looks at."""
        cache = self._open().cache
        group = cache.geometry.groups[cache.places[layer][0]]
        stop = len(self.prompt)
        return range(max(self.first, group.first_needed(stop)), stop)

    def write(self, layer: int, first: int, values: NDArray[np.generic]) -> None:
        """Put K/V ``[layers, 2, kv_heads, T, head_dim]`` of the layers from ``layer`` on at positions ``first`` on.

        Args:
            layer: the first of them; all are of one cache group.
            first: position.
            values: of the right size only, as numpy has no bfloat16. Need not be writable.

        Raises:
            ValueError: they are not all wanted, or of another shape or size. Nothing was written.

        """
        table = self._check(layer, first, values.shape)
        size = table.cache.groups[0].states.dtype.itemsize
        if values.dtype.itemsize != size:
            raise ValueError(f"K/V values of {values.dtype.itemsize} bytes, wanted {size}")
        copy_in(table, layer, first, values)

    def admit(self) -> BlockTable:
        """All of it is there: the table of a sequence that has computed its prompt. The caller closes it."""
        table, self._table = self._open(), None
        table.advance(len(self.prompt) - self.first)
        return table

    def release(self) -> None:
        """Give the pages back; nothing writes to them any more. Idempotent."""
        table, self._table = self._table, None
        if table is not None:
            table.close()

    def quarantine(self) -> None:
        """Give up the pages that were written to: something may still write to them. Idempotent."""
        table, self._table = self._table, None
        if table is not None:
            table.abandon(self.first)

    def _check(self, layer: int, first: int, shape: tuple[int, ...]) -> BlockTable:
        """The table, if K/V of this shape may be written there. Raises ValueError."""
        table, wanted = self._open(), self.wanted(layer)
        places = table.cache.places
        _, _, two, heads, _, size = table.cache.groups[places[layer][0]].shape
        if len(shape) != 5 or (two, heads, size) != (shape[1], shape[2], shape[4]):
            raise ValueError(f"K/V of shape {list(shape)}, wanted [layers, {two}, {heads}, T, {size}]")
        stop = first + shape[3]
        if not wanted.start <= first < stop <= wanted.stop:
            raise ValueError(f"K/V of positions {first} to {stop}, wanted {wanted.start} to {wanted.stop}")
        group, at = places[layer]
        if places[layer : layer + shape[0]] != tuple((group, at + index) for index in range(shape[0])):
            raise ValueError(f"K/V of layers {layer} to {layer + shape[0]}, which are not of one cache group")
        return table

    def _open(self) -> BlockTable:
        assert self._table is not None, "the reservation has ended"
        return self._table
