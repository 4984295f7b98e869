"""The journal's file system, on a simulated disk."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sim.disk import Disk

CHUNK_BYTES = 32 * 1024


class SimFileSystem:
    """See :class:`rowlock.journal.file_system.FileSystem`."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @contextmanager
    def open(self, path: Path, *, private: bool) -> Iterator[SimFile]:
        yield SimFile(self._disk, self._disk.create(str(path)), str(path))

    def reserve(self, path: Path, nbytes: int) -> None:
        number = self._disk.create(str(path))
        self._disk.truncate(number, nbytes, str(path))

    def rename(self, old: Path, new: Path) -> None:
        self._disk.rename(str(old), str(new))

    def remove(self, path: Path) -> None:
        if str(path) in self._disk.names:
            self._disk.remove(str(path))

    def make_directory(self, path: Path) -> None:
        self._disk.create(str(path), is_directory=True)

    def sync_directory(self, path: Path) -> None:
        self._disk.sync_directory(str(path))

    def read(self, path: Path) -> bytes:
        name = str(path)
        if name not in self._disk.names:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        self._disk.fail("read", name)
        return bytes(self._disk.content(self._disk.names[name]))

    def size(self, path: Path) -> int | None:
        number = self._disk.names.get(str(path))
        return None if number is None else len(self._disk.content(number))

    def is_private(self, path: Path) -> bool:
        return True  # one user, and modes are no part of what a crash can change

    def names(self, path: Path) -> list[str]:
        prefix = f"{path}/"
        found = [
            (number, name.removeprefix(prefix))
            for name, number in self._disk.names.items()
            if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
        ]
        return [name for _, name in sorted(found)]


class SimFile:
    def __init__(self, disk: Disk, number: int, path: str) -> None:
        self._disk = disk
        self._number = number
        self._path = path
        self._position = 0

    def write(self, chunk: bytes | memoryview) -> None:
        data = bytes(chunk)
        for start in range(0, len(data), CHUNK_BYTES):
            part = data[start : start + CHUNK_BYTES]
            self._disk.write(self._number, self._position, part, self._path)
            self._position += len(part)

    def truncate(self) -> None:
        self._disk.truncate(self._number, self._position, self._path)

    def sync(self) -> None:
        self._disk.sync(self._number, self._path)
