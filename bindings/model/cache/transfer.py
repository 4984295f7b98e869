"""K/V from plain host memory into pages."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from rowlock.bindings.model.cache.table import BlockTable

_INTEGERS = {2: torch.int16, 4: torch.int32}


def copy_in(table: BlockTable, layer: int, first: int, values: NDArray[np.generic]) -> None:
    """Copy K/V ``[2, kv_heads, T, head_dim]`` of a layer to positions ``first`` on, which must have pages.

    A page takes its positions of all heads at once: for each head they lie together, here and there.
    """
    group, at = table.cache.places[layer]
    states = table.cache.groups[group].states[at].view(_INTEGERS[values.dtype.itemsize])
    size, stop, pages = table.cache.geometry.page_tokens, first + values.shape[2], table.pages[group]
    values = values.view(np.dtype(f"i{values.dtype.itemsize}"))
    target = states.numpy() if states.device.type == "cpu" else None
    for position in range(first - first % size, stop, size):
        page, low, high = int(pages[position // size]), max(first, position), min(stop, position + size)
        assert page >= 0, f"there is no page for position {low}"
        piece = values[:, :, low - first : high - first]
        if target is not None:
            target[page, :, :, low - position : high - position] = piece
        else:
            states[page, :, :, low - position : high - position] = torch.from_numpy(piece.copy()).to(states.device)
