"""Where staged bytes come from: a checkpoint, or groups that are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rowlock.bindings.checkpoint.tensors import Bytes, TensorInfo
from rowlock.v1.errors import OwnerError, Reason

Groups = Mapping[tuple[str, int], memoryview]
"""Bytes of whole groups, by (tensor, group)."""


class RowSource(Protocol):
    """Where staged bytes come from."""

    def read_into(self, tensor: str, offset: int, out: Bytes) -> None:
        """Copy bytes of a tensor, from its byte ``offset`` on, into ``out``."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class GroupSource:
    """Whole groups alone: of an undo, or of a push."""

    tensors: Mapping[str, TensorInfo]
    groups: Groups

    def read_into(self, tensor: str, offset: int, out: Bytes) -> None:
        info = self.tensors[tensor]
        position = 0
        while position < out.nbytes:
            group = (offset + position) // (info.group_rows * info.row_bytes)
            data = self._group(info, group, offset + position)
            out[position : position + data.nbytes] = data
            position += data.nbytes

    def close(self) -> None:
        """Nothing is open."""

    def _group(self, info: TensorInfo, group: int, offset: int) -> Bytes:
        data = self.groups.get((info.name, group))
        first, stop = info.group_span(group)
        if data is None or data.nbytes != (stop - first) * info.row_bytes or offset != first * info.row_bytes:
            raise OwnerError(
                Reason.ROLLBACK_UNAVAILABLE, f"group {group} of {info.name} is missing or damaged in what was kept"
            )
        return np.frombuffer(data, np.uint8)


@dataclass(frozen=True)
class OverlaySource:
    """A checkpoint with pushed groups over it."""

    under: RowSource
    tensors: Mapping[str, TensorInfo]
    groups: Groups

    def read_into(self, tensor: str, offset: int, out: Bytes) -> None:
        self.under.read_into(tensor, offset, out)
        info = self.tensors[tensor]
        group_bytes = info.group_rows * info.row_bytes
        for group in range(offset // group_bytes, -(-(offset + out.nbytes) // group_bytes)):
            data = self.groups.get((tensor, group))
            if data is not None:
                start = group * group_bytes - offset
                assert start >= 0, "reads are of whole groups"
                out[start : start + data.nbytes] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        self.under.close()
