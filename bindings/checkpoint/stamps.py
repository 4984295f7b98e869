"""What the file system says of a file: enough to notice that it is another one."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class FileStamp:
    """Device, inode, size in bytes, modification and status-change time in nanoseconds."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @property
    def content_key(self) -> tuple[int, int, int, int]:
        """All but ctime, which a mere rename or link changes too."""
        return self.device, self.inode, self.size, self.mtime_ns


def stamp_of(status: os.stat_result) -> FileStamp:
    return FileStamp(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
