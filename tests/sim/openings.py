"""Faults while a starting owner opens its journal: at each effect on the disk, and in each page.

A start on a disk that fails ends in one of two ways: it is refused, with a reason that names the file, or it is as if
nothing had been; and after either, a start on a disk that works finds all that was there before.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from support.old_journal import make_old

from rowlock.journal.journal import FILE_NAME
from rowlock.journal.journal_file import JournalError
from sim.device import Device
from sim.disk import Crash, Disk, known_name
from sim.facts import JOURNAL, STATE, Facts
from sim.process import Process
from sim.scenarios import World, prepare
from sim.vfs import sim_vfs

PAGE_BYTES = 4096
FAULTS = ("error once", "error always", "no space always")
KEY = str(STATE / "owner.key")


def _none(_world: World) -> Disk:
    return Disk()


def _journal(world: World) -> Disk:
    return prepare(world, ("a", "b"), stopped=True)[0]


def _wal(world: World) -> Disk:
    return prepare(world, ("a", "b"))[0]


def _older(world: World) -> Disk:
    """A journal of the first version, which had no chain and no key."""
    disk = _journal(world)
    with tempfile.TemporaryDirectory(prefix="rowlock-older-") as root:
        path = Path(root) / FILE_NAME
        path.write_bytes(disk.content(disk.names[str(JOURNAL)]))
        make_old(path)
        _replace(disk, str(JOURNAL), path.read_bytes())
    disk.remove(KEY)
    disk.sync_directory(str(STATE))
    return disk


OPENINGS: dict[str, Callable[[World], Disk]] = {
    "open_new": _none,
    "open_stopped": _journal,
    "open_killed": _wal,
    "open_older": _older,
}
"""What is there when the journal is opened: nothing, one that was closed, one with a WAL, one to be migrated."""


def _replace(disk: Disk, path: str, content: bytes) -> None:
    number = disk.names[path]
    disk.truncate(number, 0, path)
    disk.write(number, 0, content, path)
    disk.sync(number, path)


@dataclass
class Failing:
    """Fails effects of a disk, from the one with this number on."""

    number: int = -1
    fault: str = ""
    effects: list[tuple[str, str]] = field(default_factory=list)

    def __call__(self, operation: str, path: str) -> None:
        self.effects.append((operation, path))
        here = len(self.effects) - 1
        again = self.fault.endswith("always") and here > self.number >= 0
        if here == self.number or (again and (operation != "read" or "space" not in self.fault)):
            raise OSError(errno.ENOSPC if "space" in self.fault else errno.EIO, f"injected: {operation}", path)


def _open(disk: Disk) -> str:
    """What comes of opening: empty, or why it was refused."""
    try:
        Process(disk, Device(), "p")
    except (JournalError, OSError) as error:
        return str(error)
    finally:
        sim_vfs().detach(disk)
    return ""


def _outcome(disk: Disk, before: Facts, fail: Callable[[str, str], None]) -> str:
    disk.fail = fail
    refused = _open(disk)
    assert "/" in refused or not refused, f"a refusal that names no file: {refused}"
    for crash in (Crash.DROPPED, Crash.KILLED):
        left = disk.after(crash, 0)
        assert _history(Facts.of(left)) == _history(before), "a start that was refused has changed the history"
    process = Process(left, Device(), "q").start()
    try:
        assert _history(Facts.of(left)) == _history(before), "the next start has changed the history"
        view = process.owner.view
        serves = f"READY on generation {view.resident.generation}" if view.resident else view.state.value
    finally:
        process.close()
    return f"{'refused to start; not running' if refused else 'starts; as before'}; restart: {serves}"


def _history(facts: Facts) -> tuple[object, ...]:
    return facts.transitions, facts.generations, facts.current, facts.quarantined


def _subject(path: str) -> str:
    """A file of the journal by its name, anything else by its store."""
    inside = path.removeprefix(f"{STATE}/")
    return path if inside == path else known_name(inside).partition("/")[0].replace(".partial", "")


def opening_rows(world: World, name: str) -> Iterator[dict[str, str]]:
    """The table of one kind of opening: effects of a kind on a file that come to the same are one row."""
    start = OPENINGS[name](world)
    before, watched = Facts.of(start), Failing()
    clean = start.copy()
    clean.fail = watched
    assert _open(clean) == ""
    found: dict[tuple[str, str, str, str], None] = {}
    for number, (operation, path) in enumerate(watched.effects):
        for fault in FAULTS if operation != "read" else FAULTS[:2]:
            told = _outcome(start.copy(), before, Failing(number, fault))
            found[operation, _subject(path), fault, told] = None
    for told in _damaged(start, before):
        found["page", FILE_NAME, "damaged", told] = None
    for operation, subject, fault, told in found:
        yield {
            "scenario": name, "phase": "", "operation": operation, "subjects": subject, "fault": fault, "outcome": told,
        }  # fmt: skip


def _damaged(start: Disk, before: Facts) -> Iterator[str]:
    """What comes of garbage in each page in turn; whatever is refused must be as it was found."""
    number = start.names.get(str(JOURNAL))
    pages = len(start.content(number)) // PAGE_BYTES if number is not None else 0
    for page in range(pages):
        disk = start.copy()
        good = bytes(disk.content(disk.names[str(JOURNAL)]))
        bad = good[: page * PAGE_BYTES] + b"\xa5" * PAGE_BYTES + good[(page + 1) * PAGE_BYTES :]
        _replace(disk, str(JOURNAL), bad)
        refused = _open(disk)
        if refused:
            assert FILE_NAME in refused, f"a refusal that names no file: {refused}"
            assert bytes(disk.content(disk.names[str(JOURNAL)])) == bad, "a journal that was refused is changed"
            yield "refused to start; not running; restart: not running"
        else:
            assert Facts.of(disk) == before, "a damaged page is believed"
            yield "starts; as before; restart: as before"
