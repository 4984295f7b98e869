"""The memory of one request: made and sealed by the source, looked at by the owner.

An unnamed file in memory (memfd_create(2)): the kernel frees it with its last holder, so a process that is killed
leaves nothing behind. Its size is fixed and its pages are reserved before it is used; then it is sealed, so that
neither side can take pages away under the other, and nobody but the source, which has its mapping already, can write.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Final, Self

F_SEAL_FUTURE_WRITE: Final = 0x0010
"""Linux 5.1; not named by Python 3.11."""
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class MemoryShortError(Exception):
    """There is not enough memory for one request; the message has the numbers."""


class MemoryRefusedError(Exception):
    """A descriptor that is not a request's memory; the message says what it lacks."""


class SourceMemory:
    """The source's side, writable.

    Attributes:
        fd: to be passed on; closed by ``close``.
        data: all of its bytes.

    """

    def __init__(self, fd: int, mapping: mmap.mmap) -> None:
        self.fd = fd
        self._mapping = mapping
        self.data = memoryview(mapping)

    @classmethod
    def create(cls, nbytes: int) -> Self:
        """Reserve and seal so much.

        Raises:
            MemoryShortError: it is not there.

        """
        fd = os.memfd_create("rowlock-prefill", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _refuse_more_than_available(nbytes)
            os.ftruncate(fd, nbytes)
            os.posix_fallocate(fd, 0, nbytes)
            mapping = mmap.mmap(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError as error:
            os.close(fd)
            if error.errno in {errno.ENOSPC, errno.ENOMEM, errno.EFBIG}:
                raise MemoryShortError(f"K/V and logits need {nbytes} bytes: {error.strerror}") from error
            raise
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, mapping)

    def close(self) -> None:
        """Let it go; views of ``data`` must be gone. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.data.release()
            self._mapping.close()


class OwnerMemory:
    """The owner's side, read-only.

    Attributes:
        data: all of its bytes.

    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.data = memoryview(mapping)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Self:
        """Check what was passed, and map it. The descriptor is closed, whatever happens.

        Raises:
            MemoryRefusedError: wrong kind, wrong size, or a seal is missing: it could shrink while it is read.

        """
        try:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError as error:
                raise MemoryRefusedError(f"memory: the descriptor is no sealed memory: {error.strerror}") from error
            if seals & SEALS != SEALS:
                raise MemoryRefusedError(f"memory: seals are {seals:#x}; {SEALS:#x} are needed")
            size = os.fstat(fd).st_size
            if size != nbytes:
                raise MemoryRefusedError(f"memory: has {size} bytes, {nbytes} are needed")
            return cls(mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let it go; views of ``data`` must be gone. Idempotent."""
        self.data.release()
        self._mapping.close()


def _refuse_more_than_available(nbytes: int) -> None:
    """The kernel would rather end a process than refuse a page: look before the reservation, not after."""
    available = available_bytes()
    if nbytes > available:
        raise MemoryShortError(f"K/V and logits need {nbytes} bytes; {available} are available")


def available_bytes() -> int:
    """Memory that the machine could still give, by its own estimate (MemAvailable of proc(5))."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 2**63 - 1
