"""The journal's tables. A migration, once released, never changes; a new one is added."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from rowlock.journal.chain import START, ChainedEvent, facts_of, link_of
from rowlock.journal.chain_table import bound_rows, insert, writes_digest

migrations = Migrations("rowlock")

KNOWN: Final = ("m001_initial", "m002_chain")
"""Every migration below. A journal with others was written by a newer version."""


@migrations()
def m001_initial(db: Database) -> None:
    db.execute(
        """
        CREATE TABLE owner (
            id INTEGER PRIMARY KEY CHECK (id = 1),
            device TEXT NOT NULL,
            next_generation INTEGER NOT NULL,
            current_generation INTEGER REFERENCES generations (generation)
        ) STRICT
        """
    )
    db.execute(
        """
        CREATE TABLE transitions (
            id TEXT PRIMARY KEY,
            number INTEGER NOT NULL UNIQUE,
            request_id TEXT UNIQUE,
            request_digest TEXT NOT NULL,
            state TEXT NOT NULL,
            open INTEGER NOT NULL CHECK (open IN (0, 1)),
            generation INTEGER UNIQUE,
            record TEXT NOT NULL
        ) STRICT
        """
    )
    db.execute("CREATE UNIQUE INDEX one_open_transition ON transitions (open) WHERE open = 1")
    db.execute(
        """
        CREATE TABLE events (
            transition_id TEXT NOT NULL REFERENCES transitions (id),
            sequence INTEGER NOT NULL,
            state TEXT NOT NULL,
            time REAL NOT NULL,
            message TEXT NOT NULL,
            PRIMARY KEY (transition_id, sequence)
        ) STRICT
        """
    )
    db.execute(
        """
        CREATE TABLE generations (
            generation INTEGER PRIMARY KEY,
            transition_id TEXT NOT NULL REFERENCES transitions (id),
            previous INTEGER REFERENCES generations (generation),
            program TEXT NOT NULL,
            assets TEXT NOT NULL,
            weights TEXT NOT NULL,
            checkpoint TEXT NOT NULL,
            overlay TEXT NOT NULL,
            level TEXT NOT NULL,
            undo TEXT NOT NULL
        ) STRICT
        """
    )
    db.execute(
        """
        CREATE TABLE writes (
            transition_id TEXT PRIMARY KEY REFERENCES transitions (id),
            runs TEXT NOT NULL
        ) STRICT
        """
    )
    db.execute(
        """
        CREATE TABLE quarantine (
            since REAL NOT NULL,
            reason TEXT NOT NULL,
            released REAL,
            who TEXT,
            why TEXT
        ) STRICT
        """
    )


@migrations()
def m002_chain(db: Database) -> None:
    """Events become a hash chain; those that are there are chained in the order in which they were written."""
    db.execute("ALTER TABLE writes ADD COLUMN digest TEXT NOT NULL DEFAULT ''")
    for name, runs in db.execute("SELECT transition_id, runs FROM writes").fetchall():
        db.execute("UPDATE writes SET digest = ? WHERE transition_id = ?", [writes_digest(runs), name])
    db.execute("CREATE TABLE cuts (transition_id TEXT PRIMARY KEY REFERENCES transitions (id)) STRICT")
    db.execute("ALTER TABLE events RENAME TO unchained")
    db.execute(
        """
        CREATE TABLE events (
            position INTEGER PRIMARY KEY,
            transition_id TEXT REFERENCES transitions (id),
            sequence INTEGER NOT NULL,
            state TEXT NOT NULL,
            time REAL NOT NULL,
            message TEXT NOT NULL,
            facts TEXT NOT NULL,
            link BLOB NOT NULL,
            signature BLOB NOT NULL
        ) STRICT
        """
    )
    db.execute("CREATE UNIQUE INDEX events_of_transition ON events (transition_id, sequence) WHERE sequence > 0")
    db.execute("CREATE INDEX last_event ON events (transition_id, position)")
    _chain(db)
    db.execute("DROP TABLE unchained")


def _chain(db: Database) -> None:
    """Only the last event of a transition can tell what its rows were: those of now."""
    old = db.execute(
        "SELECT u.transition_id, u.sequence, u.state, u.time, u.message, "
        "u.sequence = (SELECT max(sequence) FROM unchained l WHERE l.transition_id = u.transition_id) "
        "FROM unchained u JOIN transitions t ON t.id = u.transition_id ORDER BY t.number, u.sequence"
    ).fetchall()
    link = START
    for position, (transition, sequence, state, time, message, last) in enumerate(old, start=1):
        facts = facts_of(bound_rows(db.conn, transition)) if last else ""
        event = ChainedEvent(position, transition, sequence, state, time, message, facts)
        link = link_of(link, event)
        insert(db.conn, replace(event, link=link))
