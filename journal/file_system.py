"""The file system as the durable files need it: single effects, none of them durable by itself."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Protocol, Self


class OpenFile(Protocol):
    """A file open for writing, from its start on."""

    def write(self, chunk: bytes | memoryview) -> None:
        """All of it, at the position, which moves on."""
        ...

    def truncate(self) -> None:
        """End the file at the position."""
        ...

    def sync(self) -> None:
        """Make the content durable; its name is the directory's business."""
        ...


class FileSystem(Protocol):
    """Effects on files. Names in a directory are durable once the directory is synced."""

    def open(self, path: Path, *, private: bool) -> AbstractContextManager[OpenFile]:
        """Open for writing, as it is; created if absent, for this user alone if ``private``."""
        ...

    def reserve(self, path: Path, nbytes: int) -> None:
        """Make a file of so many bytes, content undefined, with space on disk for all of them."""
        ...

    def rename(self, old: Path, new: Path) -> None:
        """Replace ``new``, at once for every reader."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file, or a directory with all that is in it; absent is fine."""
        ...

    def make_directory(self, path: Path) -> None:
        """For this user alone; there already is fine."""
        ...

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable."""
        ...

    def read(self, path: Path) -> bytes: ...

    def size(self, path: Path) -> int | None:
        """In bytes, None if absent."""
        ...

    def is_private(self, path: Path) -> bool:
        """Whether this user alone may use a file."""
        ...

    def names(self, path: Path) -> list[str]:
        """What a directory holds, oldest change first; nothing if it is absent."""
        ...


class OsFileSystem:
    """The real one."""

    def open(self, path: Path, *, private: bool) -> _OsFile:
        return _OsFile(path, 0o600 if private else 0o666)

    def reserve(self, path: Path, nbytes: int) -> None:
        with open(path, "wb") as file:
            if nbytes:
                os.posix_fallocate(file.fileno(), 0, nbytes)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, path: Path) -> None:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def make_directory(self, path: Path) -> None:
        path.mkdir(mode=0o700, exist_ok=True)

    def sync_directory(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def size(self, path: Path) -> int | None:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return None

    def is_private(self, path: Path) -> bool:
        return not stat.S_IMODE(path.stat().st_mode) & 0o077

    def names(self, path: Path) -> list[str]:
        try:
            return [item.name for item in sorted(path.iterdir(), key=_changed)]
        except FileNotFoundError:
            return []


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:  # just removed by another thread
        return 0.0


class _OsFile:
    """Unbuffered: the chunks are large, and a buffer that can seek costs a multiple of the write itself."""

    def __init__(self, path: Path, mode: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        self._file = FileIO(descriptor, "r+")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def write(self, chunk: bytes | memoryview) -> None:
        left = memoryview(chunk)
        while left:
            left = left[self._file.write(left) :]

    def truncate(self) -> None:
        self._file.truncate()

    def sync(self) -> None:
        os.fsync(self._file.fileno())
