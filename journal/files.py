"""The one seam through which durable files are written.

| step              | what a crash after it leaves         |
|-------------------|--------------------------------------|
| write temporary   | a ``.partial`` file, ignored         |
| fsync temporary   | the same, complete                   |
| rename            | old or new, the directory decides    |
| fsync directory   | the new file                         |
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

PARTIAL_SUFFIX = ".partial"


class Files(Protocol):
    """Durable files. Every method returns only once its effect survives a power cut."""

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """Create or replace a file; a reader sees all of it or none. Makes missing directories."""
        ...

    def read(self, path: Path) -> bytes: ...

    def remove(self, path: Path) -> None:
        """Remove a file; absent is fine."""
        ...


class OsFiles:
    """The real file system."""

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        self._make_directory(path.parent)
        partial = path.with_name(path.name + PARTIAL_SUFFIX)
        try:
            with open(partial, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def remove(self, path: Path) -> None:
        if path.exists():
            path.unlink()
            sync_directory(path.parent)

    def _make_directory(self, directory: Path) -> None:
        if not directory.is_dir():
            self._make_directory(directory.parent)
            directory.mkdir(mode=0o700, exist_ok=True)
            sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
