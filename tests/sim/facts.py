"""What a disk says of an owner's past, read with plain SQL and plain parsing.

Nothing of the code under test is used here, and no table of states: the names of the terminal states are
written out once more.
"""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from sim.disk import Disk
from sim.vfs import sim_vfs

STATE = Path("/var/state")
JOURNAL = STATE / "journal.sqlite"
ENDED = {"NOOP", "PUBLISHED", "CANCELLED", "FAILED", "ROLLED_BACK", "UNLOADED", "QUARANTINED"}


@dataclass(frozen=True)
class Transition:
    number: int
    request_id: str | None
    request_digest: str
    state: str
    open: int
    generation: int | None


@dataclass(frozen=True)
class Generation:
    transition: str
    previous: int | None
    identity: tuple[str, str, str]
    undo: str


@dataclass(frozen=True)
class Facts:
    """Rows of a journal; none of them where there is no journal."""

    next_generation: int = 1
    current: int | None = None
    transitions: dict[str, Transition] = field(default_factory=dict)
    events: dict[str, tuple[str, ...]] = field(default_factory=dict)
    generations: dict[int, Generation] = field(default_factory=dict)
    quarantined: bool = False

    @classmethod
    def of(cls, disk: Disk) -> Facts:
        """The committed rows on a disk, which is not changed."""
        if str(JOURNAL) not in disk.names:
            return cls()
        names = sorted(name for name in disk.names if name.startswith(str(JOURNAL)))
        return _committed(tuple((name, bytes(disk.content(disk.names[name]))) for name in names))

    @classmethod
    def read(cls, connection: sqlite3.Connection) -> Facts:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'quarantine'").fetchone():
            return cls()
        owner = connection.execute("SELECT next_generation, current_generation FROM owner").fetchone()
        if owner is None:
            return cls()
        events: dict[str, tuple[str, ...]] = {}
        for name, state in connection.execute(
            "SELECT transition_id, state FROM events ORDER BY transition_id, sequence"
        ):
            events[name] = (*events.get(name, ()), state)
        return cls(
            owner[0],
            owner[1],
            {
                row[0]: Transition(*row[1:])
                for row in connection.execute(
                    "SELECT id, number, request_id, request_digest, state, open, generation FROM transitions"
                )
            },
            events,
            {
                row[0]: Generation(row[1], row[2], (row[3], row[4], row[5]), row[6])
                for row in connection.execute(
                    "SELECT generation, transition_id, previous, program, assets, weights, undo FROM generations"
                )
            },
            bool(connection.execute("SELECT 1 FROM quarantine WHERE released IS NULL").fetchone()),
        )

    @property
    def identity(self) -> tuple[str, str, str] | None:
        """What was published last."""
        return self.generations[self.current].identity if self.current is not None else None


@lru_cache(maxsize=256)
def _committed(files: tuple[tuple[str, bytes], ...]) -> Facts:
    """What SQLite makes of a journal's files: many images hold the same ones."""
    disk = Disk()
    disk.create(str(STATE.parent), is_directory=True)
    disk.create(str(STATE), is_directory=True)
    for name, content in files:
        disk.write(disk.create(name), 0, content, name)
    connection = sim_vfs().attach(disk)(JOURNAL)
    try:
        return Facts.read(connection)
    finally:
        sim_vfs().detach(disk)


def undo_groups(disk: Disk, transition: str) -> dict[tuple[str, int], bytes] | None:
    """The before-images on a disk, by (tensor, group), or None."""
    path = str(STATE / "undo" / f"{transition}.undo")
    if path not in disk.names:
        return None
    raw = bytes(disk.content(disk.names[path]))
    position = 8 + int.from_bytes(raw[:8], "little")
    index: list[Any] = json.loads(raw[8:position])
    groups = {}
    for tensor, group, nbytes in index:
        groups[tensor, group] = raw[position : position + nbytes]
        position += nbytes
    assert position == len(raw), f"{path}: {position} bytes described, {len(raw)} there"
    return groups
