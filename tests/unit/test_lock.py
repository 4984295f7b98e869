"""One owner per device, wherever its runtime directory is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rowlock.bindings.address import DeviceAddress
from rowlock.daemon.device_kinds import DEVICE_KINDS
from rowlock.daemon.lock import RUNTIME_DIRECTORY_VARIABLE, DeviceLock, DeviceLockedError


@pytest.fixture
def node() -> Iterator[Path]:
    """A character device that everybody may make."""
    ours, other = os.openpty()
    yield Path(os.ttyname(other))
    os.close(ours)
    os.close(other)


def in_directory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME_DIRECTORY_VARIABLE, str(path))


def test_the_file_names_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_directory(tmp_path, monkeypatch)
    first = DeviceLock("atom:3")
    with pytest.raises(DeviceLockedError, match=f"atom:3 is owned by process {os.getpid()} "):
        DeviceLock("atom:3")
    DeviceLock("atom:4").release()
    first.release()
    DeviceLock("atom:3").release()


def test_owners_with_other_runtime_directories_meet_at_the_node(
    tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_directory(tmp_path / "one", monkeypatch)
    first = DeviceLock("atom:3", node)
    in_directory(tmp_path / "two", monkeypatch)
    with pytest.raises(DeviceLockedError, match=f"another runtime directory: see `fuser {node}`"):
        DeviceLock("atom:3", node)
    first.release()
    second = DeviceLock("atom:3", node)
    second.release()


def test_a_refusal_holds_nothing(tmp_path: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_directory(tmp_path / "one", monkeypatch)
    first = DeviceLock("atom:3", node)
    in_directory(tmp_path / "two", monkeypatch)
    with pytest.raises(DeviceLockedError):
        DeviceLock("atom:3", node)
    DeviceLock("atom:3").release()
    first.release()


def test_a_node_that_is_not_there_is_no_hindrance_and_one_that_cannot_be_opened_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_directory(tmp_path, monkeypatch)
    DeviceLock("atom:3", tmp_path / "rbln3").release()
    broken = tmp_path / "socket"
    os.mknod(broken, 0o140600)  # a socket's name: it is there, and open() refuses it
    with pytest.raises(DeviceLockedError, match="its node cannot be opened"):
        DeviceLock("atom:3", broken)


@pytest.mark.parametrize(
    ("kind", "node"), [("atom", "/dev/rbln3"), ("cuda", "/dev/nvidia3"), ("rngd", "/dev/rngd/npu3mgmt")]
)
def test_the_node_is_that_of_the_physical_number(kind: str, node: str) -> None:
    assert DEVICE_KINDS[kind].node_of(DeviceAddress(kind, 3, 0)) == Path(node)
    assert DEVICE_KINDS["cpu"].node_of(DeviceAddress("cpu", 0, 0)) is None
