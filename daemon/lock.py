"""One owner per device: a lock taken before anything else."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

RUNTIME_DIRECTORY_VARIABLE: Final = "ROWLOCK_RUNTIME_DIR"


class DeviceLockedError(Exception):
    """Another owner has the device."""


def runtime_directory() -> Path:
    """Where locks and sockets live: the same for every owner of this user, whatever its options."""
    override = os.environ.get(RUNTIME_DIRECTORY_VARIABLE)
    if override:
        return Path(override)
    return Path("/run/rowlock") if os.geteuid() == 0 else Path(f"/run/user/{os.geteuid()}/rowlock")


class DeviceLock:
    """An flock held until the process ends; no child inherits it."""

    def __init__(self, device: str) -> None:
        """Take the lock.

        Raises:
            DeviceLockedError: naming the process that has it.

        """
        directory = runtime_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{device.replace(':', '-')}.lock"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode().strip() or "unknown"
            os.close(self._descriptor)
            raise DeviceLockedError(f"device {device} is owned by process {holder} (lock {path})") from None
        os.register_at_fork(after_in_child=self._leave)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)
        self._descriptor = -1

    def _leave(self) -> None:
        """In a child that was forked: the lock lives as long as anybody has it open."""
        if self._descriptor >= 0:
            self.release()


_NETWORK_FILE_SYSTEMS: Final = {"9p", "afs", "ceph", "cifs", "fuse.sshfs", "nfs", "nfs4", "smb3", "smbfs"}


def refuse_foreign_state(state: Path) -> None:
    """Refuse a state directory on a network file system: neither locks nor fsync can be relied on there.

    Raises:
        OSError: naming the file system.

    """
    best, kind = "", ""
    real = str(state.resolve())
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, file_system, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, file_system
    if kind in _NETWORK_FILE_SYSTEMS:
        raise OSError(f"state: {state} is on {kind}, a network file system; use a local disk")
