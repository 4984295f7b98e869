"""Opening the files of a checkpoint, each once: what is parsed, digested and staged is one file.

A path can lead to another file from one moment to the next; a descriptor cannot. So the
directory is opened first, every file relative to it, and nothing is opened again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.stamps import stamp_of

FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not block the one who opens it


class OpenFile:
    """A regular file, opened for reading. Positional reads only: safe for several threads.

    Attributes:
        path: for messages.
        descriptor: of the file; negative once it is closed.
        stamp: what the file system said when it was opened.

    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.stamp = stamp_of(os.fstat(descriptor))

    def read(self, limit: int) -> bytes:
        """The whole content.

        Raises:
            CheckpointError: it is longer than ``limit`` bytes, or unreadable.

        """
        if self.stamp.size > limit:
            raise CheckpointError(CheckpointFault.MALFORMED, self.path, f"is over the limit of {limit} bytes")
        return self.read_at(0, self.stamp.size)

    def read_at(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes from ``offset`` on. Raises CheckpointError."""
        buffer = bytearray(count)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` from ``offset`` on. Raises CheckpointError: UNREADABLE, or CHANGED when it ends before."""
        while out:
            try:
                count = os.preadv(self.descriptor, [out], offset)
            except OSError as error:
                raise CheckpointError(CheckpointFault.UNREADABLE, self.path, str(error)) from error
            if count == 0:
                raise CheckpointError(CheckpointFault.CHANGED, self.path, f"ends at byte {offset}")
            offset, out = offset + count, out[count:]

    @property
    def unchanged(self) -> bool:
        """Whether it still is what it was when it was opened, as far as the file system says."""
        return stamp_of(os.fstat(self.descriptor)).content_key == self.stamp.content_key

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class Folder:
    """A checkpoint directory, opened once.

    Args:
        path: the directory; links on the way are followed.
        roots: if given, the directory and every file opened must really lie below one of them.

    Raises:
        CheckpointError: NOT_FOUND or OUTSIDE.

    """

    def __init__(self, path: Path, roots: Iterable[Path] = ()) -> None:
        self._roots = [str(root.resolve()) for root in roots]
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                CheckpointFault.NOT_FOUND,
                path,
                f"no such directory ({error})",
                "check the path on the owner's machine",
            ) from error
        try:
            self.path = Path(self._check_place(path, self._descriptor))
        except BaseException:
            self.close()
            raise

    def open(self, name: str) -> OpenFile | None:
        """A regular file of the directory, or None when there is none of that name.

        Raises:
            CheckpointError: UNREADABLE, or OUTSIDE the roots.

        """
        path = self.path / name
        try:
            descriptor = os.open(name, FLAGS, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(CheckpointFault.UNREADABLE, path, str(error)) from error
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise CheckpointError(CheckpointFault.UNREADABLE, path, "is not a regular file")
            self._check_place(path, descriptor)
            return OpenFile(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _check_place(self, path: Path, descriptor: int) -> str:
        """Where an open file really is; refused if that is outside the roots."""
        real = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if self._roots and not any(real == root or real.startswith(root.rstrip("/") + "/") for root in self._roots):
            raise CheckpointError(
                CheckpointFault.OUTSIDE,
                path,
                f"is really {real}, which is below none of the configured roots",
                "move it there, or add its directory to target_roots",
            )
        return real
