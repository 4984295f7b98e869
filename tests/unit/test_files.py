"""Durable files and undo files."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rowlock.journal.files import Files
from rowlock.journal.undo import UndoError, UndoFiles


def test_a_write_replaces_whole_and_makes_directories(tmp_path: Path) -> None:
    files, path = Files(), tmp_path / "a" / "b" / "c"
    files.write(path, [b"old"])
    files.write(path, [b"n", memoryview(b"ew")])
    assert files.read(path) == b"new"
    assert [item.name for item in path.parent.iterdir()] == ["c"]
    files.remove(path)
    files.remove(path)
    assert not path.exists()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    files, path = Files(), tmp_path / "c"
    files.write(path, [b"old"])

    def broken():  # type: ignore[no-untyped-def]
        yield b"ne"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.write(path, broken())
    assert files.read(path) == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["c"]


def test_undo_round_trip(tmp_path: Path) -> None:
    undo = UndoFiles(tmp_path, Files())
    groups = {("a", 0): memoryview(b"x" * 10), ("a", 7): memoryview(b""), ("b", 3): memoryview(b"yz")}
    undo.write("t", groups)
    assert {key: bytes(value) for key, value in undo.read("t").items()} == {k: bytes(v) for k, v in groups.items()}


@pytest.mark.parametrize("damage", [lambda raw: raw[:-1], lambda raw: raw + b"x", lambda raw: raw[:4], lambda _: b""])
def test_a_damaged_undo_is_refused(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    undo = UndoFiles(tmp_path, Files())
    path = undo.write("t", {("a", 0): memoryview(b"0123456789")})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UndoError, match=r"t\.undo"):
        undo.read("t")


def test_an_absent_undo_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UndoError, match=r"nope\.undo"):
        UndoFiles(tmp_path, Files()).read("nope")


def test_reserved_space_is_written_into_and_given_back(tmp_path: Path) -> None:
    undo = UndoFiles(tmp_path, Files())
    undo.reserve("a", 1 << 20)
    undo.reserve("b", 1 << 20)
    assert undo.owners() == {"a", "b"}
    assert sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir()) >= 2 << 20
    undo.write("a", {("t", 0): memoryview(b"xyz")})
    undo.release("b")
    assert [path.name for path in tmp_path.iterdir()] == ["a.undo"]
    assert bytes(undo.read("a")["t", 0]) == b"xyz"
    undo.release("a")
    assert undo.owners() == set()


def test_a_file_is_written_by_many_at_once(tmp_path: Path) -> None:
    files, path = Files(), tmp_path / "c"
    with ThreadPoolExecutor(8) as executor:
        list(executor.map(lambda index: files.write(path, [b"%d" % index] * 1000), range(40)))
    content = path.read_bytes()
    assert content == content[: len(content) // 1000] * 1000
    assert [item.name for item in tmp_path.iterdir()] == ["c"]


def test_files_are_synced_before_they_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the real file system: content, then name, then directory."""
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append("sync directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    Files().write(tmp_path / "a", [b"content"])
    assert done == ["sync file", "rename", "sync directory"]
