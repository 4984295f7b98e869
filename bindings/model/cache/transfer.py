"""K/V from plain host memory into pages."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from rowlock.bindings.model.cache.table import BlockTable

_INTEGERS: Final = {2: torch.int16, 4: torch.int32}


def copy_in(table: BlockTable, layer: int, first: int, values: NDArray[np.generic]) -> None:
    """Copy K/V ``[2, kv_heads, T, head_dim]`` of a layer to positions ``first`` on, which must have pages.

    All whole pages are copied at once, and what is left before and behind them.
    """
    group, at = table.cache.places[layer]
    states = table.cache.groups[group].states[at].view(_INTEGERS[values.dtype.itemsize])
    values = values.view(np.dtype(f"i{values.dtype.itemsize}"))
    size, stop, pages = table.cache.geometry.page_tokens, first + values.shape[2], table.pages[group]
    assert (pages[first // size : -(-stop // size)] >= 0).all(), "there is no page for some of these positions"
    whole = range(-(-first // size), stop // size)
    if whole:
        middle = values[:, :, whole.start * size - first : whole.stop * size - first]
        two, heads, _, head_dim = middle.shape
        shaped = middle.reshape(two, heads, len(whole), size, head_dim).transpose(2, 0, 1, 3, 4)
        _put(states, _index(pages[whole.start : whole.stop]), shaped)
    for low, high in _edges(first, stop, size):
        page, offset = int(pages[low // size]), low % size
        _put(states[page, :, :, offset : offset + high - low], ..., values[:, :, low - first : high - first])


def _edges(first: int, stop: int, size: int) -> list[tuple[int, int]]:
    """The positions that do not fill a page: of the first page, and of the last."""
    begin, end = -(-first // size) * size, stop // size * size
    if begin > end:
        return [(first, stop)]
    return [(low, high) for low, high in ((first, begin), (end, stop)) if low < high]


def _index(pages: NDArray[np.int32]) -> slice | NDArray[np.int32]:
    """Pages as a slice, if they lie one behind the other: that is quicker."""
    first = int(pages[0])
    return slice(first, first + len(pages)) if (np.diff(pages) == 1).all() else pages


def _put(states: torch.Tensor, index: Any, values: NDArray[np.generic]) -> None:
    if states.device.type == "cpu":
        states.numpy()[index] = values
    else:
        states[index] = torch.from_numpy(values.copy()).to(states.device)
