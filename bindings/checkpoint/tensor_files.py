"""Tensors in files that are open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rowlock.bindings.checkpoint.files import OpenFile
from rowlock.bindings.checkpoint.header import Extent
from rowlock.bindings.checkpoint.tensors import Bytes, TensorInfo


@dataclass(frozen=True)
class TensorFiles:
    """Where tensors lie, and the files to read them from. Safe for use by several threads.

    Attributes:
        extents: by tensor name.
        files: by file name.

    """

    extents: Mapping[str, Extent]
    files: Mapping[str, OpenFile]

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: extent.tensor for name, extent in self.extents.items()}

    def read_into(self, tensor: str, offset: int, out: Bytes) -> None:
        """Copy ``out.nbytes`` bytes of a tensor, from its byte ``offset`` on, into ``out``.

        Raises:
            CheckpointError: UNREADABLE, or CHANGED when the file has become shorter.

        """
        extent = self.extents[tensor]
        assert 0 <= offset <= extent.tensor.nbytes - out.nbytes
        self.files[extent.path.name].read_into(extent.offset + offset, out.data)

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self.files.values():
            file.close()
