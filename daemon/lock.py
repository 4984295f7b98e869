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
    """Flocks held until the process ends; no child inherits them.

    One is on a file of the runtime directory, and says who holds it. One is on the device's node, where there is
    such a node: owners whose runtime directories differ (of other users, in containers) meet there.
    """

    def __init__(self, device: str, node: Path | None = None) -> None:
        """Take both.

        Raises:
            DeviceLockedError: naming the process that has it, or the node.

        """
        directory = runtime_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptors: list[int] = []
        os.register_at_fork(after_in_child=self.release)  # before there is anything to let go of
        try:
            self._claim(device, directory / f"{device.replace(':', '-')}.lock")
            if node is not None and node.exists():
                self._claim_node(device, node)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let go. Also what a child does that was forked: a lock lives as long as anybody has it open."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _claim(self, device: str, path: Path) -> None:
        descriptor = self._open(path, os.O_RDWR | os.O_CREAT)
        if not _locked(descriptor):
            holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
            raise DeviceLockedError(f"device {device} is owned by process {holder} (lock {path})")
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)

    def _claim_node(self, device: str, node: Path) -> None:
        try:
            descriptor = self._open(node, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            raise DeviceLockedError(f"device {device}: its node cannot be opened: {error}") from error
        if not _locked(descriptor):
            raise DeviceLockedError(
                f"device {device} is owned by a process with another runtime directory: see `fuser {node}`"
            )

    def _open(self, path: Path, flags: int) -> int:
        self._descriptors.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
        return self._descriptors[-1]


def _locked(descriptor: int) -> bool:
    """Whether the lock could be taken, at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
