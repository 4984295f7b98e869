"""K/V from plain host memory into pages."""

from __future__ import annotations

from types import EllipsisType
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from rowlock.bindings.model.cache.paged import INTEGERS, GroupPages
from rowlock.bindings.model.cache.table import BlockTable

Index: TypeAlias = tuple[int | slice | NDArray[np.int32] | EllipsisType, ...]


def copy_in(table: BlockTable, layer: int, first: int, values: NDArray[np.generic]) -> None:
    """Copy K/V ``[layers, 2, kv_heads, T, head_dim]`` to positions ``first`` on, which must have pages.

    All whole pages are copied at once, and what is left before and behind them.

    Args:
        table: whose pages they are.
        layer: the first of the layers, which are of one cache group.
        first: position.
        values: of the right size, whatever their type.

    """
    group, at = table.cache.places[layer]
    target, pages = table.cache.groups[group], table.pages[group]
    values = values.view(f"i{values.dtype.itemsize}")
    layers, two, heads, tokens, head_dim = values.shape
    size, stop, places = table.cache.geometry.page_tokens, first + tokens, slice(at, at + layers)
    assert (pages[first // size : -(-stop // size)] >= 0).all(), "there is no page for some of these positions"
    whole = range(-(-first // size), stop // size)
    if whole:
        middle = values[:, :, :, whole.start * size - first : whole.stop * size - first]
        shaped = middle.reshape(layers, two, heads, len(whole), size, head_dim).transpose(0, 3, 1, 2, 4, 5)
        _put(target, (places, _index(pages[whole.start : whole.stop])), shaped)
    for low, high in _edges(first, stop, size):
        page, offset = int(pages[low // size]), low % size
        part = values[:, :, :, low - first : high - first]
        _put(target, (places, page, ..., slice(offset, offset + high - low), slice(None)), part)


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


def _put(target: GroupPages, index: Index, values: NDArray[np.generic]) -> None:
    if target.host is not None:
        target.host[index] = values
    else:
        states = target.states.view(INTEGERS[values.dtype.itemsize])
        states[index] = torch.from_numpy(values.copy()).to(states.device)
