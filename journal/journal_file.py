"""The SQLite file under a journal: a connection that writes, one that reads, and what a COMMIT has come to.

WAL with ``synchronous=FULL``: a COMMIT that returned is durable. One that raised has an unknown outcome;
:meth:`JournalFile.settle` finds out.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from rowlock.journal.migrations import KNOWN, migrations
from rowlock.journal.points import Moment, Point, Points, around

Connect = Callable[[Path], sqlite3.Connection]
"""Opens the file of a journal: in autocommit mode, for use by several threads."""


def connect_file(path: Path) -> sqlite3.Connection:
    """The real one."""
    return sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)


def connect_read_only(path: Path) -> sqlite3.Connection:
    """One that cannot change the file."""
    name = f"{path.absolute().as_uri()}?mode=ro"
    return sqlite3.connect(name, uri=True, check_same_thread=False, isolation_level=None, timeout=10)


class JournalError(Exception):
    """The journal cannot be opened, read or written. Nothing of the failed write is there."""


class CommitUnknownError(JournalError):
    """A COMMIT raised: it may or may not be on disk."""


class JournalFile:
    """Safe for use by several threads: writes one after the other, reads beside them.

    Args:
        path: of the file, which is made if it is not there.
        points: told of every commit.
        connect: opens it.

    Raises:
        JournalError: unreadable, damaged, or of a newer version.

    """

    def __init__(self, path: Path, points: Points, connect: Connect) -> None:
        self.path = path
        self._points = points
        self._connect = connect
        self._lock = threading.Lock()
        self._reader_lock = threading.Lock()
        with self._problems():
            self._db = self._open()
            _check_pages(self._db, path)
            _check_version(self._db, path)

    def migrate(self, device: str) -> None:
        """Bring the tables to this version, each step by itself, and name the owner's device where none is named."""
        with self._problems(), around(self._points, Point.COMMIT_OWNER, device):
            migrations.apply(self._db)
            with self._db.atomic():
                self._db.execute("INSERT OR IGNORE INTO owner VALUES (1, ?, 1, NULL)", [device])

    def open_reader(self) -> None:
        """Reads are possible from now on."""
        with self._problems():
            self._reader = self._open()

    def close(self) -> None:
        with self._lock, self._reader_lock:
            self._db.close()
            self._reader.close()

    def settle(self, subject: str) -> None:
        """After :class:`CommitUnknownError`: reopen, and write. Only once that succeeds is what is read final.

        Raises:
            JournalError: it cannot be found out.

        """
        with self._lock, self._problems():
            self._db.close()
            self._db = self._open()
            with around(self._points, Point.SETTLE, subject):
                self._db.conn.execute("BEGIN IMMEDIATE")
                self._db.execute("UPDATE owner SET id = id")
                self._db.conn.execute("COMMIT")

    @contextmanager
    def transaction(self, point: Point, subject: str) -> Iterator[Database]:
        """One transaction, committed at the end.

        Raises:
            JournalError: nothing of it is there.
            CommitUnknownError: it may be there.

        """
        with self._lock:
            conn = self._db.conn
            try:
                conn.execute("BEGIN IMMEDIATE")
                yield self._db
            except sqlite3.Error as error:
                _roll_back(conn)
                raise JournalError(f"{self.path}: {error}") from error
            except BaseException:
                _roll_back(conn)
                raise
            self._points.at(point, Moment.BEFORE, subject)
            try:
                conn.execute("COMMIT")
            except sqlite3.Error as error:
                raise CommitUnknownError(f"{self.path}: COMMIT: {error}") from error
            self._points.at(point, Moment.AFTER, subject)

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        with self._reader_lock:
            try:
                yield self._reader.conn
            except sqlite3.Error as error:
                raise JournalError(f"{self.path}: {error}") from error

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        with self.reading():
            return list(self._reader.query(query, parameters))

    def row(self, query: str, parameters: Sequence[Any] = ()) -> dict[str, Any]:
        return self.rows(query, parameters)[0]

    def _open(self) -> Database:
        db = Database(self._connect(self.path), execute_plugins=False)
        (mode,) = db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise JournalError(f"{self.path}: SQLite cannot use a write-ahead log here; its directory may be failing")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA foreign_keys = ON")
        return db

    @contextmanager
    def _problems(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise JournalError(f"{self.path}: {error}") from error


def _check_pages(db: Database, path: Path) -> None:
    """A damaged page is found now, not when its rows are needed."""
    (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if found != "ok":
        raise JournalError(
            f"{path}: is damaged: {found}; restore the state directory from a backup, with its owner.key"
        )


def _check_version(db: Database, path: Path) -> None:
    newer = {item.name for item in migrations.applied(db)} - set(KNOWN)
    if newer:
        raise JournalError(f"{path}: written by a newer rowlock ({', '.join(sorted(newer))}); upgrade the daemon")


def _roll_back(connection: sqlite3.Connection) -> None:
    with contextlib.suppress(sqlite3.Error):  # the first error is the one that tells
        if connection.in_transaction:
            connection.execute("ROLLBACK")
