"""Rows that differ: found as integers, as the fewest runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from rowlock.bindings.checkpoint.tensors import Bytes, TensorInfo
from rowlock.bindings.device import Allocation
from rowlock.bindings.model.layout import Layout
from rowlock.daemon.owner.record import RowRange

Drift = tuple[tuple[str, int, int], ...]
"""Groups that differ from the published identity: (tensor, first row, rows)."""


def row_runs(info: TensorInfo, start: int, old: Bytes, new: Bytes) -> list[tuple[int, int]]:
    """Runs of rows (first, count) in which bytes differ; ``start`` is the byte of the tensor where both begin."""
    row, word = start // info.row_bytes, _word(info.row_bytes)
    differs = (old.view(word) != new.view(word)).reshape(old.nbytes // info.row_bytes, -1).any(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], differs, [False])).astype(np.int8)))
    return [(row + int(first), int(stop - first)) for first, stop in zip(edges[::2], edges[1::2], strict=True)]


_EXPONENTS: Final = {"BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00), "F32": (np.uint32, 0x7F800000)}
"""Bits that are all set exactly in infinities and NaNs."""


def new_nonfinite(dtype: str, old: Bytes, new: Bytes) -> int:
    """How many values of ``new`` are infinite or NaN where ``old`` is neither."""
    word, exponent = _EXPONENTS[dtype]
    if count_nonfinite(dtype, new) == 0:
        return 0
    mask = word(exponent)
    return int(np.count_nonzero(((new.view(word) & mask) == mask) & ((old.view(word) & mask) != mask)))


def count_nonfinite(dtype: str, data: Bytes) -> int:
    """How many values are infinite or NaN."""
    word, exponent = _EXPONENTS[dtype]
    values = data.view(word)
    if _all_finite(values, exponent):
        return 0
    return int(np.count_nonzero((values & word(exponent)) == exponent))


def _all_finite(values: npt.NDArray[np.unsignedinteger], exponent: int) -> bool:
    """Whether none is infinite or NaN, found without temporary memory: what is not lies at the end of the integers.

    As signed integers the positive ones are the largest, as unsigned ones the negative.
    """
    signed = values.view(np.dtype(f"i{values.itemsize}"))
    sign = 1 << (8 * values.itemsize - 1)
    return values.size == 0 or bool(signed.max() < exponent and values.max() < sign + exponent)


def row_ranges(
    runs: Iterable[tuple[str, int, int]], layout: Layout, allocations: Mapping[str, Allocation]
) -> list[RowRange]:
    """Rows of tensors as rows of allocations, in their order, neighbours joined."""
    rows = sorted(
        (placement.parent, placement.first_row + first, count)
        for name, first, count in runs
        for placement in (layout.placements[name],)
    )
    found = []
    for parent, group in itertools.groupby(rows, key=lambda row: row[0]):
        allocation = allocations[parent]
        row_bytes = allocation.parent.row_bytes
        for first, count in _merge((first, count) for _, first, count in group):
            found.append(RowRange(parent, allocation.id, first, count, first * row_bytes, count * row_bytes))
    return found


def group_runs(info: TensorInfo, groups: Iterable[int]) -> Iterator[tuple[str, int, int]]:
    """Whole groups as (tensor, first row, rows)."""
    for group in groups:
        first, stop = info.group_span(group)
        yield info.name, first, stop - first


def group_ranges(
    changed: Mapping[str, Iterable[int]], layout: Layout, allocations: Mapping[str, Allocation]
) -> list[RowRange]:
    """Whole groups of tensors, as rows of their allocations."""
    runs = (run for name, groups in changed.items() for run in group_runs(layout.placements[name].tensor, groups))
    return row_ranges(runs, layout, allocations)


def _word(nbytes: int) -> type[np.unsignedinteger]:
    """The widest integer that divides a size: bytes are compared as integers, never as floats."""
    for word, size in ((np.uint64, 8), (np.uint32, 4), (np.uint16, 2)):
        if nbytes % size == 0:
            return word
    return np.uint8


def _merge(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join runs that touch, so that neighbours become one write."""
    current: tuple[int, int] | None = None
    for first, rows in runs:
        if current is not None and current[0] + current[1] == first:
            current = (current[0], current[1] + rows)
            continue
        if current is not None:
            yield current
        current = (first, rows)
    if current is not None:
        yield current
