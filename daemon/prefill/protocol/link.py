"""One end of the socket pair between an owner and a source: whole frames, with at most one descriptor each."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from dataclasses import dataclass
from typing import Final, Self

from rowlock.daemon.prefill.protocol.frames import FRAME_MAX, Frame, FrameError, FrameFault, Memory, pack, parse

DESCRIPTORS_MAX: Final = 8
"""Room for descriptors of one packet: more than one are refused, but have to be received to be closed."""


@dataclass(frozen=True)
class Received:
    """A frame, and the descriptor that came with it, which its receiver closes; -1 is none."""

    frame: Frame
    fd: int = -1


class Link:
    """A SOCK_SEQPACKET socket. One thread sends, one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        with contextlib.suppress(OSError):  # the kernel's own bound is enough for one frame
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * FRAME_MAX)

    @classmethod
    def pair(cls) -> tuple[Self, socket.socket]:
        """An end to keep, and one to be inherited by a child."""
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(own), other

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, frame: Frame, fd: int = -1, *, wait: bool = True) -> None:
        """Send one frame.

        Raises:
            BlockingIOError: with ``wait`` off, when there is no room now.
            OSError: the other side is gone.
            FrameError: OVERSIZED.

        """
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else []
        flags = socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
        self._socket.sendmsg([pack(frame)], rights, flags)

    def receive(self, *, wait: bool = True) -> Received | None:
        """The next frame; None once the other side has closed.

        Raises:
            BlockingIOError: with ``wait`` off, when there is none now.
            FrameError: what came is no frame, or has descriptors that do not belong to it.

        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        try:
            packet, ancillary, got, _ = self._socket.recvmsg(
                FRAME_MAX, socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize), flags
            )
        except ConnectionResetError:
            return None
        fds = _descriptors(ancillary)
        try:
            received = self._understand(packet, got, fds)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return received

    def _understand(self, packet: bytes, flags: int, fds: list[int]) -> Received | None:
        if not packet and not fds:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise FrameError(FrameFault.OVERSIZED, f"a packet of more than {FRAME_MAX} bytes, or too many descriptors")
        frame = parse(packet)
        wanted = 1 if isinstance(frame, Memory) else 0
        if len(fds) != wanted:
            name = type(frame).__name__.lower()
            raise FrameError(FrameFault.MALFORMED, f"{name} came with {len(fds)} descriptors, not {wanted}")
        return Received(frame, fds[0] if fds else -1)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
