"""A request's memory cannot shrink, grow or be written by the owner's side, and no other descriptor will do."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.prefill import GEOMETRY

from rowlock.daemon.prefill.protocol import memory as memory_module
from rowlock.daemon.prefill.protocol.frames import FrameError, Memory, Release, pack
from rowlock.daemon.prefill.protocol.geometry import RequestLayout
from rowlock.daemon.prefill.protocol.link import Link
from rowlock.daemon.prefill.protocol.memory import (
    MemoryRefusedError,
    MemoryShortError,
    OwnerMemory,
    SourceMemory,
)

SIZE = 10_000


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_what_the_source_writes_the_owner_reads_and_cannot_change() -> None:
    before = open_fds()
    source = SourceMemory.create(SIZE)
    for change in (lambda: os.ftruncate(source.fd, 0), lambda: os.ftruncate(source.fd, 2 * SIZE)):
        with pytest.raises(PermissionError):
            change()
    with pytest.raises(PermissionError):
        mmap.mmap(source.fd, SIZE)
    owner = OwnerMemory.attach(os.dup(source.fd), SIZE)
    assert os.fstat(source.fd).st_blocks * 512 >= SIZE, "every page is reserved before the first is written"
    source.data[5:8] = b"abc"
    assert owner.data[5:8] == b"abc"
    assert owner.data.readonly
    source.close()
    assert owner.data[5:8] == b"abc", "the memory lives as long as somebody holds it"
    owner.close()
    assert open_fds() == before


def _file() -> int:
    return os.open("/dev/zero", os.O_RDONLY)


def _pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


def _unsealed() -> int:
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    return fd


def _can_shrink() -> int:
    fd = _unsealed()
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, memory_module.SEALS & ~fcntl.F_SEAL_SHRINK)
    return fd


def _other_size() -> int:
    fd = _unsealed()
    os.ftruncate(fd, SIZE - 1)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, memory_module.SEALS)
    return fd


@pytest.mark.parametrize("make", [_file, _pipe, _unsealed, _can_shrink, _other_size])
def test_no_other_descriptor_is_taken_and_none_is_left_open(make: Callable[[], int]) -> None:
    before = open_fds()
    with pytest.raises(MemoryRefusedError, match="memory"):
        OwnerMemory.attach(make(), SIZE)
    assert open_fds() == before


def test_memory_that_is_not_there_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_fds()
    monkeypatch.setattr(memory_module, "available_bytes", lambda: SIZE - 1)
    with pytest.raises(MemoryShortError, match=f"need {SIZE} bytes; {SIZE - 1} are available"):
        SourceMemory.create(SIZE)
    assert open_fds() == before


def test_a_link_takes_a_descriptor_only_with_the_frame_it_belongs_to() -> None:
    before = open_fds()
    link, other = Link.pair()
    fd = os.open("/dev/null", os.O_RDONLY)
    sender = Link(other)
    sender.send(Memory(1, 2, SIZE), fd)
    received = link.receive()
    assert received is not None
    assert received.frame == Memory(1, 2, SIZE)
    os.close(received.fd)
    for frame, fds in ((Release(1, 2), [fd]), (Memory(1, 2, SIZE), []), (Memory(1, 2, SIZE), [fd, fd])):
        socket.send_fds(other, [pack(frame)], fds)
        with pytest.raises(FrameError, match="descriptors"):
            link.receive()
    socket.send_fds(other, [pack(Memory(1, 2, SIZE))], [fd] * 20)
    with pytest.raises(FrameError, match="too many descriptors"):
        link.receive()
    other.send(b"\0" * 150_000)
    with pytest.raises(FrameError, match="packet of more than"):
        link.receive()
    sender.close()
    assert link.receive() is None
    link.close()
    os.close(fd)
    assert open_fds() == before


def test_the_memory_has_room_for_what_is_wanted_and_for_nothing_else() -> None:
    layout = RequestLayout(GEOMETRY, tokens=10, firsts=(7, 4))
    per_token = GEOMETRY.token_bytes
    assert GEOMETRY.groups == (4, None)
    assert layout.offsets == tuple(per_token * count for count in (0, 3, 6, 12, 15, 21))
    assert layout.logits_offset % 64 == 0
    assert layout.nbytes == layout.logits_offset + 2 * GEOMETRY.vocab
    assert GEOMETRY.runs(0, 5) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert GEOMETRY.runs(1, 1) == []
