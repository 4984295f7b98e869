"""Durable before-images: one file per transition.

Format: an 8-byte little-endian length, a JSON list of ``[tensor, group, bytes]``, then the
bytes of the groups in that order. Whoever reads one checks each group against the manifest
of the generation that it restores, so the file carries no digests of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rowlock.journal.files import Files

INDEX_BYTES: Final = 256 * 1024
"""Space reserved beside the groups: index and file system."""

Groups = Mapping[tuple[str, int], memoryview]
"""Bytes of whole groups, by (tensor, group)."""


class UndoError(Exception):
    """An undo file that is missing or damaged."""


@dataclass(frozen=True)
class UndoFiles:
    """The undo files of a state directory."""

    directory: Path
    files: Files

    def reserve(self, transition: str, nbytes: int) -> None:
        """Take the space for an undo of so many bytes. Raises OSError when there is not enough."""
        self.files.reserve(self._path(transition), nbytes + INDEX_BYTES)

    def release(self, transition: str) -> None:
        """Give back what was reserved, and remove what was written."""
        self.files.release(self._path(transition))
        self.files.remove(self._path(transition))

    def owners(self) -> set[str]:
        """The transitions that have an undo file, written or reserved."""
        return {name.split(".", 1)[0] for name in self.files.names(self.directory)}

    def nbytes(self, transition: str) -> int:
        """Size of a transition's undo file; 0 where there is none."""
        return self.files.size(self._path(transition)) or 0

    def write(self, transition: str, groups: Groups) -> Path:
        path = self._path(transition)
        self.files.write(path, _encode(groups))
        return path

    def read(self, transition: str) -> dict[tuple[str, int], memoryview]:
        """The groups of a transition's undo.

        Raises:
            UndoError: absent, unreadable, or not of this format.

        """
        path = self._path(transition)
        try:
            return _decode(self.files.read(path))
        except (OSError, ValueError, TypeError) as error:
            raise UndoError(f"{path}: {error}") from error

    def _path(self, transition: str) -> Path:
        return self.directory / f"{transition}.undo"


def _encode(groups: Groups) -> Iterator[bytes | memoryview]:
    index = json.dumps([[tensor, group, data.nbytes] for (tensor, group), data in groups.items()]).encode()
    yield len(index).to_bytes(8, "little") + index
    yield from groups.values()


def _decode(raw: bytes) -> dict[tuple[str, int], memoryview]:
    view = memoryview(raw)
    position = 8 + int.from_bytes(raw[:8], "little")
    groups = {}
    for tensor, group, nbytes in json.loads(raw[8:position]):
        groups[str(tensor), int(group)] = view[position : position + nbytes]
        position += nbytes
    if position != len(raw):
        raise ValueError(f"describes {position} bytes, holds {len(raw)}")
    return groups
