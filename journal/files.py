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
import uuid
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Final, Protocol

PARTIAL_SUFFIX: Final = ".partial"
RESERVED_SUFFIX: Final = ".reserved"


class Files(Protocol):
    """Durable files. Every method returns only once its effect survives a power cut."""

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """Create or replace a file; a reader sees all of it or none. Makes missing directories."""
        ...

    def reserve(self, path: Path, nbytes: int) -> None:
        """Take the space that a later write of this path will need.

        Raises:
            OSError: there is not enough (ENOSPC).

        """
        ...

    def release(self, path: Path) -> None:
        """Give back what was reserved and not written."""
        ...

    def read(self, path: Path) -> bytes: ...

    def remove(self, path: Path) -> None:
        """Remove a file; absent is fine."""
        ...


class OsFiles:
    """The real file system."""

    def reserve(self, path: Path, nbytes: int) -> None:
        self._make_directory(path.parent)
        partial = _reserved(path)
        try:
            with open(partial, "wb") as file:
                if nbytes:
                    os.posix_fallocate(file.fileno(), 0, nbytes)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def release(self, path: Path) -> None:
        _reserved(path).unlink(missing_ok=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        self._make_directory(path.parent)
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
        if _reserved(path).exists():
            _reserved(path).rename(partial)
        try:
            # unbuffered: the chunks are large, and a buffer that can seek costs a multiple of the write itself
            with open(partial, "r+b" if partial.exists() else "xb", buffering=0) as file:
                for chunk in chunks:
                    _write_all(file, chunk)
                file.truncate()
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


def _write_all(file: FileIO, chunk: bytes | memoryview) -> None:
    left = memoryview(chunk)
    while left:
        left = left[file.write(left) :]


def _reserved(path: Path) -> Path:
    return path.with_name(path.name + RESERVED_SUFFIX)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
