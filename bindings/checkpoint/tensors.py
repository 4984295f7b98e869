"""Rows and groups: how one tensor's bytes are divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Final

import numpy as np
import numpy.typing as npt

from rowlock.bindings.checkpoint.dtypes import ITEM_BYTES

Bytes = npt.NDArray[np.uint8]
"""A contiguous one-dimensional buffer of bytes."""

GROUP_BYTES: Final = 64 * 1024
"""A group is the fewest consecutive rows that reach this many bytes."""


@dataclass(frozen=True)
class TensorInfo:
    """Name, dtype and shape of one checkpoint tensor.

    A row is the last dimension; a tensor of one or no dimension is one row.

    Attributes:
        name: the checkpoint's name, e.g. ``model.embed_tokens.weight``.
        dtype: safetensors name, e.g. ``BF16``.
        shape: dimensions, outermost first.

    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def row_bytes(self) -> int:
        return (self.shape[-1] if self.shape else 1) * ITEM_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @cached_property
    def group_rows(self) -> int:
        """Rows of every group but the last, which may be shorter."""
        if self.row_bytes == 0:
            return max(self.rows, 1)
        return max(-(-GROUP_BYTES // self.row_bytes), 1)

    @property
    def groups(self) -> int:
        return -(-self.rows // self.group_rows) if self.row_bytes else 0

    def group_span(self, group: int) -> tuple[int, int]:
        """First row and row past the end of a group."""
        first = group * self.group_rows
        return first, min(first + self.group_rows, self.rows)

    def rows_of(self, groups: Sequence[int]) -> int:
        """Rows of different groups, in ascending order, together."""
        if not groups:
            return 0
        first, last = self.group_span(groups[-1])
        return (len(groups) - 1) * self.group_rows + last - first
