"""The journal's tables. A migration, once released, never changes; a new one is added."""

from __future__ import annotations

from typing import Final

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

migrations = Migrations("rowlock")

KNOWN: Final = ("m001_initial",)
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
