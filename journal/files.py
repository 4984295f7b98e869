"""The one seam through which durable files are written.

| step              | what a crash after it leaves         |
|-------------------|--------------------------------------|
| write temporary   | a ``.partial`` file, ignored         |
| fsync temporary   | the same, complete                   |
| rename            | old or new, the directory decides    |
| fsync directory   | the new file                         |
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rowlock.journal.file_system import FileSystem, OsFileSystem
from rowlock.journal.points import UNOBSERVED, Point, Points, around

PARTIAL_SUFFIX: Final = ".partial"
RESERVED_SUFFIX: Final = ".reserved"


@dataclass(frozen=True)
class Files:
    """Durable files. What writes or removes returns only once its effect survives a power cut.

    Attributes:
        system: where they are.
        points: told of each effect.

    """

    system: FileSystem = field(default_factory=OsFileSystem)
    points: Points = UNOBSERVED

    def write(self, path: Path, chunks: Iterable[bytes | memoryview], *, private: bool = False) -> None:
        """Create or replace a file; a reader sees all of it or none. Makes missing directories.

        ``private``: for this user alone, from its creation on.
        """
        self.make_directory(path.parent)
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
        if self.exists(_reserved(path)):
            self._rename(_reserved(path), partial)
        try:
            with self.system.open(partial, private=private) as file:
                with around(self.points, Point.WRITE_FILE, str(path)):
                    for chunk in chunks:
                        file.write(chunk)
                    file.truncate()
                with around(self.points, Point.SYNC_FILE, str(path)):
                    file.sync()
            self._rename(partial, path)
        except BaseException:
            self.system.remove(partial)
            raise
        self._sync_directory(path.parent)

    def reserve(self, path: Path, nbytes: int) -> None:
        """Take the space that a later write of this path will need.

        Raises:
            OSError: there is not enough (ENOSPC).

        """
        self.make_directory(path.parent)
        self.reserve_exactly(_reserved(path), nbytes)

    def reserve_exactly(self, path: Path, nbytes: int) -> None:
        """A file of so many bytes for its space alone, which need not survive; after an error it is not there."""
        try:
            with around(self.points, Point.RESERVE_FILE, str(path)):
                self.system.reserve(path, nbytes)
        except BaseException:
            self.system.remove(path)
            raise

    def release(self, path: Path) -> None:
        """Give back what was reserved and not written."""
        self.discard(_reserved(path))

    def remove(self, path: Path) -> None:
        """Remove a file; absent is fine."""
        if self.exists(path):
            self.discard(path)
            self._sync_directory(path.parent)

    def discard(self, path: Path) -> None:
        """Remove a file or directory that may come back after a power cut; absent is fine."""
        if self.exists(path):
            with around(self.points, Point.REMOVE_FILE, str(path)):
                self.system.remove(path)

    def make_directory(self, path: Path) -> None:
        """Make a directory, and those above it that are missing."""
        if self.exists(path):
            return
        self.make_directory(path.parent)
        with around(self.points, Point.MAKE_DIRECTORY, str(path)):
            self.system.make_directory(path)
        self._sync_directory(path.parent)

    def keep_directory(self, path: Path) -> None:
        """Make a directory, and its own name durable whoever made it.

        That a directory is there does not mean that it survives: the process that made it may have been
        killed before it could sync the one above. What may not be read was not made by this user.
        """
        self.make_directory(path)
        for above in path.parents:
            with suppress(PermissionError):
                self._sync_directory(above)

    def keep_names(self, path: Path) -> None:
        """Make durable what names a directory holds, if there is one."""
        if self.exists(path):
            self._sync_directory(path)

    def read(self, path: Path) -> bytes:
        return self.system.read(path)

    def exists(self, path: Path) -> bool:
        return self.system.size(path) is not None

    def size(self, path: Path) -> int | None:
        """In bytes, None if absent."""
        return self.system.size(path)

    def is_private(self, path: Path) -> bool:
        """Whether this user alone may use a file."""
        return self.system.is_private(path)

    def names(self, path: Path) -> list[str]:
        """What a directory holds, oldest change first; nothing if it is absent."""
        return self.system.names(path)

    def _rename(self, old: Path, new: Path) -> None:
        with around(self.points, Point.RENAME_FILE, str(new)):
            self.system.rename(old, new)

    def _sync_directory(self, path: Path) -> None:
        with around(self.points, Point.SYNC_DIRECTORY, str(path)):
            self.system.sync_directory(path)


def _reserved(path: Path) -> Path:
    return path.with_name(path.name + RESERVED_SUFFIX)
