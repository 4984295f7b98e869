"""SQLite on a simulated disk: a VFS, registered with the very library that ``sqlite3`` uses.

The journal's code and Python's ``sqlite3`` run unmodified; only the name of the VFS is in the
URI that the connection is opened with. It follows what SQLite's own unix VFS does where durability
depends on it: the directory is synced with the first sync of a WAL or rollback journal, and never
for the database itself. Locks and shared memory belong to the process, and die with it.
"""

from __future__ import annotations

import _sqlite3
import atexit
import ctypes
import errno
import itertools
import sqlite3
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sim.disk import Disk, parent_of

OK, BUSY, NOMEM, IOERR, CANTOPEN, NOTFOUND = 0, 5, 7, 10, 14, 12
IOERR_READ, IOERR_SHORT_READ, IOERR_WRITE, IOERR_FSYNC = 266, 522, 778, 1034
OPEN_DELETEONCLOSE, OPEN_MAIN_JOURNAL, OPEN_SUPER_JOURNAL, OPEN_WAL = 0x8, 0x800, 0x4000, 0x80000
SHM_UNLOCK, SHM_SHARED, SHM_EXCLUSIVE = 1, 4, 8
SHARED, RESERVED, PENDING, EXCLUSIVE = 1, 2, 3, 4
NAME = b"rowlock-sim"


class _File(Structure):
    _fields_ = (("methods", c_void_p), ("handle", c_int64))


_F = POINTER(_File)
_METHODS: dict[str, Any] = {
    "xClose": CFUNCTYPE(c_int, _F),
    "xRead": CFUNCTYPE(c_int, _F, c_void_p, c_int, c_int64),
    "xWrite": CFUNCTYPE(c_int, _F, c_void_p, c_int, c_int64),
    "xTruncate": CFUNCTYPE(c_int, _F, c_int64),
    "xSync": CFUNCTYPE(c_int, _F, c_int),
    "xFileSize": CFUNCTYPE(c_int, _F, POINTER(c_int64)),
    "xLock": CFUNCTYPE(c_int, _F, c_int),
    "xUnlock": CFUNCTYPE(c_int, _F, c_int),
    "xCheckReservedLock": CFUNCTYPE(c_int, _F, POINTER(c_int)),
    "xFileControl": CFUNCTYPE(c_int, _F, c_int, c_void_p),
    "xSectorSize": CFUNCTYPE(c_int, _F),
    "xDeviceCharacteristics": CFUNCTYPE(c_int, _F),
    "xShmMap": CFUNCTYPE(c_int, _F, c_int, c_int, c_int, POINTER(c_void_p)),
    "xShmLock": CFUNCTYPE(c_int, _F, c_int, c_int, c_int),
    "xShmBarrier": CFUNCTYPE(None, _F),
    "xShmUnmap": CFUNCTYPE(c_int, _F, c_int),
}
_VFS_CALLS: dict[str, Any] = {
    "xOpen": CFUNCTYPE(c_int, c_void_p, c_char_p, _F, c_int, POINTER(c_int)),
    "xDelete": CFUNCTYPE(c_int, c_void_p, c_char_p, c_int),
    "xAccess": CFUNCTYPE(c_int, c_void_p, c_char_p, c_int, POINTER(c_int)),
    "xFullPathname": CFUNCTYPE(c_int, c_void_p, c_char_p, c_int, c_void_p),
    "xDlOpen": c_void_p,
    "xDlError": c_void_p,
    "xDlSym": c_void_p,
    "xDlClose": c_void_p,
    "xRandomness": CFUNCTYPE(c_int, c_void_p, c_int, c_void_p),
    "xSleep": CFUNCTYPE(c_int, c_void_p, c_int),
    "xCurrentTime": CFUNCTYPE(c_int, c_void_p, POINTER(c_double)),
    "xGetLastError": CFUNCTYPE(c_int, c_void_p, c_int, c_void_p),
}


class _Methods(Structure):
    _fields_ = (("iVersion", c_int), *_METHODS.items())


class _Vfs(Structure):
    _fields_ = (
        ("iVersion", c_int), ("szOsFile", c_int), ("mxPathname", c_int), ("pNext", c_void_p),
        ("zName", c_char_p), ("pAppData", c_void_p), *_VFS_CALLS.items(),
    )  # fmt: skip


class _Connection(sqlite3.Connection):
    """Tells the disk of each COMMIT."""

    disk: Disk

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        cursor = super().execute(sql, *parameters)
        if sql == "COMMIT":
            self.disk.committed()
        return cursor


@dataclass
class _Shared:
    """What the connections of one process share of one file: locks, and the index of the WAL."""

    locks: dict[int, int] = field(default_factory=dict)
    regions: list[Any] = field(default_factory=list)
    slots: dict[int, dict[int, int]] = field(default_factory=dict)


@dataclass
class _Open:
    disk: Disk
    path: str
    inode: int
    shared: _Shared
    flags: int
    sync_directory: bool


class SimVfs:
    """All simulated disks of this process, by number; see :func:`sim_vfs`."""

    def __init__(self) -> None:
        self._disks: dict[int, tuple[Disk, dict[int, _Shared]]] = {}
        self._connections: list[tuple[Disk, sqlite3.Connection]] = []
        self._numbers = itertools.count(1)
        self._files: dict[int, _Open] = {}
        self._handles = itertools.count(1)
        self._library = ctypes.CDLL(_sqlite3.__file__)
        self._kept = {name: kind(getattr(self, f"_{name}")) for name, kind in _METHODS.items()}
        self._methods = _Methods(2, *self._kept.values())
        calls = [kind(getattr(self, f"_{name}")) if kind is not c_void_p else None for name, kind in _VFS_CALLS.items()]
        self._vfs = _Vfs(1, ctypes.sizeof(_File), 512, None, NAME, None, *calls)
        result = self._library.sqlite3_vfs_register(ctypes.byref(self._vfs), 0)
        assert result == OK, f"sqlite3_vfs_register: {result}"
        atexit.register(self._end)

    def _end(self) -> None:
        """Close what a failed test has left open: SQLite must not call into an interpreter that is gone."""
        for _, connection in self._connections:
            connection.close()

    def attach(self, disk: Disk) -> Callable[[Path], sqlite3.Connection]:
        """A way to open SQLite files on a disk, for one process of the simulation."""
        number = next(self._numbers)
        self._disks[number] = (disk, {})

        def connect(path: Path) -> sqlite3.Connection:
            uri = f"file:/{number}{path}?vfs={NAME.decode()}"
            connection = sqlite3.connect(
                uri, uri=True, check_same_thread=False, isolation_level=None, timeout=0, factory=_Connection
            )
            connection.disk = disk
            self._connections.append((disk, connection))
            return connection

        return connect

    def detach(self, disk: Disk) -> None:
        """The process has ended: whatever it still does to the disk fails, and changes nothing."""

        def dead(operation: str, path: str) -> None:
            raise OSError(errno.EIO, f"{operation}: the process has ended", path)

        disk.fail = dead
        for owner, connection in self._connections:
            if owner is disk:
                connection.close()
        self._connections = [item for item in self._connections if item[0] is not disk]
        self._disks = {number: item for number, item in self._disks.items() if item[0] is not disk}

    def _locate(self, name: bytes) -> tuple[Disk, dict[int, _Shared], str]:
        number, _, path = name.decode()[1:].partition("/")
        disk, shared = self._disks[int(number)]
        return disk, shared, f"/{path}"

    # The VFS.

    def _xOpen(self, _vfs: int, name: bytes | None, file: Any, flags: int, out: Any) -> int:  # noqa: N802
        file.contents.methods = None
        if name is None:
            return CANTOPEN
        disk, shared, path = self._locate(name)
        try:
            inode = disk.create(path)
        except OSError:
            return CANTOPEN
        handle = next(self._handles)
        syncs = bool(flags & (OPEN_WAL | OPEN_MAIN_JOURNAL | OPEN_SUPER_JOURNAL))
        self._files[handle] = _Open(disk, path, inode, shared.setdefault(inode, _Shared()), flags, syncs)
        file.contents.methods = ctypes.addressof(self._methods)
        file.contents.handle = handle
        if out:
            out[0] = flags
        return OK

    def _xDelete(self, _vfs: int, name: bytes, sync: int) -> int:  # noqa: N802
        disk, _, path = self._locate(name)
        try:
            if path in disk.names:
                disk.remove(path)
            if sync:
                disk.sync_directory(parent_of(path))
        except OSError:
            return IOERR
        return OK

    def _xAccess(self, _vfs: int, name: bytes, _flags: int, out: Any) -> int:  # noqa: N802
        disk, _, path = self._locate(name)
        out[0] = int(path in disk.names)
        return OK

    def _xFullPathname(self, _vfs: int, name: bytes, size: int, out: int) -> int:  # noqa: N802
        assert len(name) < size
        ctypes.memmove(out, name + b"\0", len(name) + 1)
        return OK

    def _xRandomness(self, _vfs: int, size: int, out: int) -> int:  # noqa: N802
        ctypes.memset(out, 0x5A, size)
        return size

    def _xSleep(self, _vfs: int, microseconds: int) -> int:  # noqa: N802
        return microseconds

    def _xCurrentTime(self, _vfs: int, out: Any) -> int:  # noqa: N802
        out[0] = 2460000.5
        return OK

    def _xGetLastError(self, _vfs: int, _size: int, _out: int) -> int:  # noqa: N802
        return OK

    # A file.

    def _xClose(self, file: Any) -> int:  # noqa: N802
        opened = self._files.pop(file.contents.handle)
        opened.shared.locks.pop(file.contents.handle, None)
        return OK

    def _xRead(self, file: Any, out: int, size: int, offset: int) -> int:  # noqa: N802
        opened = self._files[file.contents.handle]
        try:
            opened.disk.fail("read", opened.path)
        except OSError:
            return IOERR_READ
        data = bytes(memoryview(opened.disk.content(opened.inode))[offset : offset + size])
        if len(data) == size:
            ctypes.memmove(out, data, size)
            return OK
        ctypes.memmove(out, data + bytes(size - len(data)), size)
        return IOERR_SHORT_READ

    def _xWrite(self, file: Any, data: int, size: int, offset: int) -> int:  # noqa: N802
        opened = self._files[file.contents.handle]
        return _effect(IOERR_WRITE, opened.disk.write, opened.inode, offset, ctypes.string_at(data, size), opened.path)

    def _xTruncate(self, file: Any, size: int) -> int:  # noqa: N802
        opened = self._files[file.contents.handle]
        return _effect(IOERR, opened.disk.truncate, opened.inode, size, opened.path)

    def _xSync(self, file: Any, _flags: int) -> int:  # noqa: N802
        opened = self._files[file.contents.handle]
        result = _effect(IOERR_FSYNC, opened.disk.sync, opened.inode, opened.path)
        if result == OK and opened.sync_directory:
            opened.sync_directory = False
            result = _effect(IOERR_FSYNC, opened.disk.sync_directory, parent_of(opened.path))
        return result

    def _xFileSize(self, file: Any, out: Any) -> int:  # noqa: N802
        opened = self._files[file.contents.handle]
        out[0] = len(opened.disk.content(opened.inode))
        return OK

    def _xLock(self, file: Any, level: int) -> int:  # noqa: N802
        handle = file.contents.handle
        locks = self._files[handle].shared.locks
        others = [held for other, held in locks.items() if other != handle]
        limit = PENDING if level == SHARED else RESERVED
        busy = any(held >= limit for held in others)
        if not busy and level == EXCLUSIVE and others:
            locks[handle] = PENDING
            return BUSY
        if not busy:
            locks[handle] = max(level, locks.get(handle, 0))
        return BUSY if busy else OK

    def _xUnlock(self, file: Any, level: int) -> int:  # noqa: N802
        handle = file.contents.handle
        locks = self._files[handle].shared.locks
        if level:
            locks[handle] = level
        else:
            locks.pop(handle, None)
        return OK

    def _xCheckReservedLock(self, file: Any, out: Any) -> int:  # noqa: N802
        locks = self._files[file.contents.handle].shared.locks
        out[0] = int(any(held >= RESERVED for held in locks.values()))
        return OK

    def _xFileControl(self, _file: Any, _operation: int, _argument: int) -> int:  # noqa: N802
        return NOTFOUND

    def _xSectorSize(self, _file: Any) -> int:  # noqa: N802
        return 4096

    def _xDeviceCharacteristics(self, _file: Any) -> int:  # noqa: N802
        return 0

    # The index of the WAL, which is memory.

    def _xShmMap(self, file: Any, page: int, size: int, extend: int, out: Any) -> int:  # noqa: N802
        regions = self._files[file.contents.handle].shared.regions
        while extend and len(regions) <= page:
            regions.append(ctypes.create_string_buffer(size))
        out[0] = ctypes.addressof(regions[page]) if page < len(regions) else None
        return OK

    def _xShmLock(self, file: Any, offset: int, count: int, flags: int) -> int:  # noqa: N802
        handle = file.contents.handle
        slots = self._files[handle].shared.slots
        wanted = [slots.setdefault(slot, {}) for slot in range(offset, offset + count)]
        if flags & SHM_UNLOCK:
            for held in wanted:
                held.pop(handle, None)
            return OK
        kind = SHM_EXCLUSIVE if flags & SHM_EXCLUSIVE else SHM_SHARED
        for held in wanted:
            others = [how for other, how in held.items() if other != handle]
            if others and (kind == SHM_EXCLUSIVE or SHM_EXCLUSIVE in others):
                return BUSY
        for held in wanted:
            held[handle] = kind
        return OK

    def _xShmBarrier(self, _file: Any) -> None:  # noqa: N802
        pass

    def _xShmUnmap(self, file: Any, delete: int) -> int:  # noqa: N802
        handle = file.contents.handle
        shared = self._files[handle].shared
        for held in shared.slots.values():
            held.pop(handle, None)
        if delete:
            shared.regions = []
        return OK


def _effect(code: int, effect: Callable[..., None], *args: Any) -> int:
    try:
        effect(*args)
    except OSError:
        return code
    return OK


@cache
def sim_vfs() -> SimVfs:
    """The one of this process: a VFS once registered stays."""
    return SimVfs()
