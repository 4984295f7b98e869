"""A disk that forgets what was not made durable.

Files have bytes that readers see, and bytes that survive; directories have names that readers
see, and names that survive. ``sync`` moves the one to the other. What a crash leaves is up
to the :class:`Crash` that is asked for:

| crash   | unsynced bytes and names                                                           |
|---------|------------------------------------------------------------------------------------|
| KILLED  | all still there (the kernel lives), and still not durable                          |
| DROPPED | gone                                                                               |
| TORN    | each sector of each write, and each name, is there or not, in any combination      |
"""

from __future__ import annotations

import errno
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from blake3 import blake3

SECTOR_BYTES = 512


class Crash(StrEnum):
    KILLED = "killed"
    DROPPED = "dropped"
    TORN = "torn"


@dataclass
class Inode:
    """A file, or a directory.

    Attributes:
        epoch: of the disk that may change it in place; any other copies it first.
        content: what readers see.
        durable: what survives.
        pending: since the last sync: (offset, bytes), or a new size.
        known: its digest, until it is changed.

    """

    epoch: object
    is_directory: bool = False
    content: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes] | int] = field(default_factory=list)
    known: bytes = b""

    def digest(self) -> bytes:
        """Of all that is in it, for equality."""
        if not self.known:
            digest = blake3(f"{len(self.content)} {len(self.durable)} {self.is_directory}".encode())
            digest.update(bytes(self.content))
            digest.update(self.durable)
            for change in self.pending:
                digest.update(repr(change if isinstance(change, int) else (change[0], len(change[1]))).encode())
            self.known = digest.digest()
        return self.known

    def copy(self, epoch: object) -> Inode:
        return Inode(epoch, self.is_directory, bytearray(self.content), self.durable, list(self.pending))


@dataclass(frozen=True)
class NameChange:
    """A name that was made, replaced or removed, and not yet made durable."""

    removed: str | None
    added: str | None
    inode: int

    @property
    def directory(self) -> str:
        path = self.added or self.removed
        assert path is not None
        return parent_of(path)


@dataclass
class Disk:
    """See the module's text.

    Attributes:
        observe: told before each effect and after it: (operation, path).
        fail: may raise OSError instead of an effect.
        committed: told of each COMMIT that has taken effect; may raise all the same.
        version: grows with every effect.

    """

    inodes: dict[int, Inode] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    durable_names: dict[str, int] = field(default_factory=dict)
    changes: list[NameChange] = field(default_factory=list)
    serial: int = 0
    observe: Callable[[str, str], None] = lambda _operation, _path: None
    fail: Callable[[str, str], None] = lambda _operation, _path: None
    committed: Callable[[], None] = lambda: None
    version: int = 0
    _epoch: object = field(default_factory=object)

    def __post_init__(self) -> None:
        if not self.names:
            root = self._new_inode(is_directory=True)
            self.names["/"] = self.durable_names["/"] = root

    def copy(self) -> Disk:
        """As it is, unsynced and all; both go on by themselves."""
        self._epoch = object()
        return Disk(dict(self.inodes), dict(self.names), dict(self.durable_names), list(self.changes), self.serial)

    def after(self, crash: Crash, seed: int) -> Disk:
        """What a crash leaves."""
        left = self.copy()
        if crash is Crash.KILLED:
            return left
        rng = random.Random(seed) if crash is Crash.TORN else None
        for number in [number for number, inode in left.inodes.items() if inode.pending]:
            inode = left._own(number)
            content = bytearray(inode.durable)
            for change in inode.pending if rng else ():
                _apply_torn(content, change, rng)
            inode.content, inode.durable, inode.pending = content, bytes(content), []
        for change in left.changes if rng else ():
            if rng.random() < 0.5:
                _apply_name(left.durable_names, change)
        left.names, left.changes = _reachable(left.durable_names, left.inodes), []
        left.durable_names = dict(left.names)
        return left

    def key(self) -> bytes:
        """A digest of all that a later process, or a later crash, could see of it."""
        parts = [str(len(self.changes)).encode()]
        for names in (self.names, self.durable_names):
            for path in sorted(names):
                parts += (known_name(path).encode(), self.inodes[names[path]].digest())
        return blake3(b"".join(parts)).digest()

    # What processes do. Each is one effect.

    def create(self, path: str, *, is_directory: bool = False) -> int:
        self._require_directory(parent_of(path))
        if path in self.names:
            return self.names[path]
        self._begin("create", path)
        number = self._new_inode(is_directory=is_directory)
        self._rename(NameChange(None, path, number))
        self.observe("create", path)
        return number

    def write(self, number: int, offset: int, data: bytes, path: str) -> None:
        self._begin("write", path)
        inode = self._own(number)
        if len(inode.content) < offset:
            inode.content.extend(bytes(offset - len(inode.content)))
        inode.content[offset : offset + len(data)] = data
        inode.pending.append((offset, data))
        self.observe("write", path)

    def truncate(self, number: int, size: int, path: str) -> None:
        inode = self._own(number)
        if len(inode.content) != size:
            self._begin("truncate", path)
            _resize(inode.content, size)
            inode.pending.append(size)
            self.observe("truncate", path)

    def sync(self, number: int, path: str) -> None:
        self._begin("sync", path)
        inode = self._own(number)
        inode.durable, inode.pending = bytes(inode.content), []
        self.observe("sync", path)

    def rename(self, old: str, new: str) -> None:
        self._begin("rename", new)
        if old not in self.names:
            raise FileNotFoundError(errno.ENOENT, "no such file", old)
        self._rename(NameChange(old, new, self.names[old]))
        self.observe("rename", new)

    def remove(self, path: str) -> None:
        self._begin("remove", path)
        for found in sorted((item for item in self.names if item == path or item.startswith(f"{path}/")), reverse=True):
            self._rename(NameChange(found, None, self.names[found]))
        self.observe("remove", path)

    def sync_directory(self, path: str) -> None:
        self._require_directory(path)
        self._begin("sync_directory", path)
        for change in [item for item in self.changes if item.directory == path]:
            _apply_name(self.durable_names, change)
            self.changes.remove(change)
            self.version += 1
        self.observe("sync_directory", path)

    def content(self, number: int) -> bytearray:
        return self.inodes[number].content

    def _begin(self, operation: str, path: str) -> None:
        self.fail(operation, path)

    def _require_directory(self, path: str) -> None:
        number = self.names.get(path)
        if number is None or not self.inodes[number].is_directory:
            raise FileNotFoundError(errno.ENOENT, "no such directory", path)

    def _rename(self, change: NameChange) -> None:
        _apply_name(self.names, change)
        self.changes.append(change)
        self.version += 1

    def _new_inode(self, *, is_directory: bool) -> int:
        self.serial += 1
        self.inodes[self.serial] = Inode(self._epoch, is_directory)
        return self.serial

    def _own(self, number: int) -> Inode:
        inode = self.inodes[number]
        if inode.epoch is not self._epoch:
            inode = self.inodes[number] = inode.copy(self._epoch)
        inode.known = b""
        self.version += 1
        return inode


@lru_cache(maxsize=4096)
def known_name(path: str) -> str:
    """A path without what is random in it."""
    return re.sub(r"\.[0-9a-f]{32}\.partial$", ".partial", path)


def parent_of(path: str) -> str:
    return path.rpartition("/")[0] or "/"


def _apply_name(names: dict[str, int], change: NameChange) -> None:
    if change.removed is not None:
        names.pop(change.removed, None)
    if change.added is not None:
        names[change.added] = change.inode


def _apply_torn(content: bytearray, change: tuple[int, bytes] | int, rng: random.Random) -> None:
    if isinstance(change, int):
        if rng.random() < 0.5:
            _resize(content, change)
        return
    offset, data = change
    start = 0
    while start < len(data):
        stop = min(start + SECTOR_BYTES - (offset + start) % SECTOR_BYTES, len(data))
        if rng.random() < 0.5:
            if len(content) < offset + start:
                content.extend(bytes(offset + start - len(content)))
            content[offset + start : offset + stop] = data[start:stop]
        start = stop


def _resize(content: bytearray, size: int) -> None:
    if len(content) > size:
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _reachable(names: dict[str, int], inodes: dict[int, Inode]) -> dict[str, int]:
    """Names whose every directory is there too."""
    found = {}
    for path in sorted(names):
        above = parent_of(path)
        if path == above or (above in found and inodes[found[above]].is_directory):
            found[path] = names[path]
    return found
