"""A journal as version 0.1 wrote it before events were chained."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from sqlite_utils import Database

from rowlock.journal.journal import FILE_NAME
from rowlock.journal.migrations import migrations


def make_old(journal: Path) -> None:
    """Turn a journal back into one of the first version: the same rows, without the chain."""
    rows = sqlite3.connect(journal)
    rows.row_factory = sqlite3.Row
    tables = ("owner", "transitions", "generations", "quarantine")
    kept = {name: rows.execute(f"SELECT * FROM {name}").fetchall() for name in tables}
    kept["events"] = rows.execute(
        "SELECT transition_id, sequence, state, time, message FROM events WHERE sequence > 0 ORDER BY position"
    ).fetchall()
    kept["writes"] = rows.execute("SELECT transition_id, runs FROM writes").fetchall()
    rows.close()
    for path in journal.parent.glob(f"{FILE_NAME}*"):
        path.unlink()
    db = Database(sqlite3.connect(journal, isolation_level=None), execute_plugins=False)
    db.execute("PRAGMA journal_mode = WAL")
    migrations.apply(db, stop_before="m002_chain")
    db.execute("PRAGMA foreign_keys = OFF")
    for table, values in kept.items():
        for row in values:
            columns = ", ".join(row.keys())
            db.execute(f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(row))})", list(row))
    db.close()
