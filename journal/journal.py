"""The journal: every transition, every generation, in one SQLite file.

All writes go through the methods here, each one transaction: a returned method is durable. Each adds the events of
its commit to the hash chain (:mod:`rowlock.journal.chain`). A COMMIT that raises has an unknown
outcome; ``CommitUnknownError`` says so, and :meth:`Journal.settle` finds out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from sqlite_utils import Database

from rowlock.journal import chain_table
from rowlock.journal.chain import KEY_STATE, ChainedEvent, Head
from rowlock.journal.files import Files
from rowlock.journal.journal_file import Connect, JournalError, JournalFile, connect_file, connect_read_only
from rowlock.journal.points import Point
from rowlock.journal.rows import Event, GenerationRow, TransitionRow
from rowlock.journal.signing import KeyFileError, OwnerKey

FILE_NAME: Final = "journal.sqlite"
BALLAST_BYTES: Final = 1024 * 1024


class Journal:
    """See the module's text. Safe for use by several threads."""

    def __init__(
        self,
        directory: Path,
        device: str,
        files: Files | None = None,
        connect: Connect = connect_file,
        now: Callable[[], float] = time.time,
        *,
        read_only: bool = False,
    ) -> None:
        """Open or create.

        Args:
            directory: there already, durably; of the owner's key too.
            device: the owner's.
            files: for key and ballast; its observer is told of each commit too.
            connect: opens the SQLite file.
            now: seconds since the epoch, for the event that names the key.
            read_only: look at what is there, whatever older version wrote it; change nothing.

        Raises:
            JournalError: unreadable, of a newer version, or of another device; or the key cannot be used.

        """
        self._ballast = directory / "ballast"
        self._files = files or Files()
        self._file = JournalFile(directory / FILE_NAME, self._files.points, connect_read_only if read_only else connect)
        if not read_only:
            self._file.migrate(device)
        self._file.open_reader()
        found = self._file.row("SELECT device FROM owner")["device"]
        if found != device:
            raise JournalError(
                f"{self._file.path}: belongs to device {found!r}, not to {device!r}; "
                "give each device its own state directory"
            )
        if not read_only:
            self._key = _owner_key(directory, self._files)
            self._announce_key(now())

    def close(self) -> None:
        self._file.close()

    # Writes, in the order of a transition's life.

    def open_transition(self, row: TransitionRow, event: Event) -> None:
        with self._file.transaction(Point.COMMIT_OPEN, row.id) as db:
            db.execute(
                "INSERT INTO transitions (id, number, request_id, request_digest, state, open, record) "
                "SELECT ?, coalesce(max(number), 0) + 1, ?, ?, ?, 1, ? FROM transitions",
                [row.id, row.request_id, row.request_digest, row.state, row.record],
            )
            _chain(db, row.id, [event])

    def move(self, id: str, record: str, event: Event) -> None:  # noqa: A002 - the field's name
        """Enter a state that is not terminal."""
        with self._file.transaction(Point.COMMIT_STAGED, id) as db:
            _update(db, id, event.state, record, is_open=True)
            _chain(db, id, [event])

    def mark_journaled(self, id: str, event: Event, record_of: Callable[[int], str], writes: str = "[]") -> int:  # noqa: A002
        """Intent is durable: from here on device writes may have begun.

        Args:
            id: the transition.
            event: of entering the state.
            record_of: makes the record, given the generation.
            writes: the exact rows that are to be written, as JSON text.

        Returns:
            The generation: a number never given out before.

        """
        with self._file.transaction(Point.COMMIT_INTENT, id) as db:
            taken = db.execute("UPDATE owner SET next_generation = next_generation + 1 RETURNING next_generation - 1")
            generation = int(taken.fetchall()[0][0])
            _update(db, id, event.state, record_of(generation), is_open=True)
            db.execute("UPDATE transitions SET generation = ? WHERE id = ?", [generation, id])
            db.execute("INSERT INTO writes VALUES (?, ?, ?)", [id, writes, chain_table.writes_digest(writes)])
            _chain(db, id, [event])
        return generation

    def publish(self, row: GenerationRow, state: str, record: str, events: Sequence[Event]) -> None:
        """The single step that makes a generation the owner's identity."""
        with self._file.transaction(Point.COMMIT_PUBLISH, row.transition_id) as db:
            _update(db, row.transition_id, state, record, is_open=False)
            values = vars(row)
            columns, marks = ", ".join(values), ", ".join("?" * len(values))
            db.execute(f"INSERT INTO generations ({columns}) VALUES ({marks})", list(values.values()))
            db.execute("UPDATE owner SET current_generation = ?", [row.generation])
            _chain(db, row.transition_id, events, self._key.sign)

    def end(self, id: str, state: str, record: str, events: Sequence[Event]) -> None:  # noqa: A002
        """Enter a terminal state other than published."""
        with self._file.transaction(Point.COMMIT_END, id) as db:
            _update(db, id, state, record, is_open=False)
            _chain(db, id, events, self._key.sign)

    def amend(self, id: str, record: str, now: float) -> None:  # noqa: A002
        """Replace the record of an ended transition; the chain says that it was done."""
        with self._file.transaction(Point.COMMIT_AMEND, id) as db:
            changed = db.execute("UPDATE transitions SET record = ? WHERE id = ? AND open = 0", [record, id]).rowcount
            assert changed == 1, f"transition {id} has not ended"
            _chain(db, id, [Event(0, "AMENDED", now, "the record was completed")], self._key.sign)

    def settle(self, id: str) -> str:  # noqa: A002
        """After ``CommitUnknownError``: the state that is really on disk, empty if there is no such row.

        A write on a reopened connection must succeed first; only then is what it reads final.

        Raises:
            JournalError: it cannot be found out.

        """
        self._file.settle(id)
        rows = self._file.rows("SELECT state FROM transitions WHERE id = ?", [id])
        return str(rows[0]["state"]) if rows else ""

    def cut_undos(self, transitions: Sequence[str], message: str, now: float) -> None:
        """Let go of the durable undos of some transitions: a signed retention cut. Their files go afterwards."""
        with self._file.transaction(Point.COMMIT_OWNER, "cut") as db:
            for transition in transitions:
                db.execute("INSERT INTO cuts VALUES (?)", [transition])
            _chain(db, "", [Event(0, "CUT", now, message)], self._key.sign)

    def record_drift(self, message: str, now: float) -> None:
        """Resident bytes were found that are not those of the published identity: a signed event of the owner."""
        with self._file.transaction(Point.COMMIT_OWNER, "drift") as db:
            _chain(db, "", [Event(0, "DRIFT", now, message)], self._key.sign)

    # Quarantine: it outlives the process.

    def record_quarantine(self, reason: str, now: float) -> None:
        with self._file.transaction(Point.COMMIT_QUARANTINE, reason) as db:
            db.execute("INSERT INTO quarantine (since, reason) VALUES (?, ?)", [now, reason])
            _chain(db, "", [Event(0, "QUARANTINED", now, reason)], self._key.sign)

    def release_quarantine(self, who: str, why: str, now: float) -> None:
        with self._file.transaction(Point.COMMIT_RELEASE, who) as db:
            db.execute("UPDATE quarantine SET released = ?, who = ?, why = ? WHERE released IS NULL", [now, who, why])
            _chain(db, "", [Event(0, "RELEASED", now, f"by {who}: {why}")], self._key.sign)

    def quarantine(self) -> str:
        """Why the device is quarantined, or empty."""
        rows = self._file.rows("SELECT reason FROM quarantine WHERE released IS NULL ORDER BY since LIMIT 1")
        return str(rows[0]["reason"]) if rows else ""

    # Space for the terminal record, kept while there is some.

    def reserve_ballast(self) -> None:
        """Keep a file that can be given up so that an outcome can be recorded on a full disk.

        Raises:
            OSError: there is not enough space.

        """
        if self._files.size(self._ballast) != BALLAST_BYTES:
            self._files.reserve_exactly(self._ballast, BALLAST_BYTES)

    def drop_ballast(self) -> None:
        self._files.discard(self._ballast)

    # Reads; they never wait for a write.

    def current(self) -> GenerationRow | None:
        rows = self._file.rows("SELECT * FROM generations WHERE generation = (SELECT current_generation FROM owner)")
        return GenerationRow(**rows[0]) if rows else None

    def generation(self, number: int) -> GenerationRow | None:
        rows = self._file.rows("SELECT * FROM generations WHERE generation = ?", [number])
        return GenerationRow(**rows[0]) if rows else None

    def generations(self) -> list[GenerationRow]:
        """Newest first."""
        return [GenerationRow(**row) for row in self._file.rows("SELECT * FROM generations ORDER BY generation DESC")]

    def undos_cut(self) -> frozenset[str]:
        """The transitions whose durable undo was let go."""
        return frozenset(row["transition_id"] for row in self._file.rows("SELECT transition_id FROM cuts"))

    def find(self, id_or_request: str) -> TransitionRow | None:
        """A transition by its id or its request id."""
        rows = self._file.rows(f"SELECT {_COLUMNS} FROM transitions WHERE id = ?1 OR request_id = ?1", [id_or_request])
        return TransitionRow(**rows[0]) if rows else None

    def writes(self, id: str) -> str:  # noqa: A002
        """The exact rows of a journaled transition, as JSON text."""
        rows = self._file.rows("SELECT runs FROM writes WHERE transition_id = ?", [id])
        return str(rows[0]["runs"]) if rows else "[]"

    def open_transitions(self) -> list[TransitionRow]:
        return [TransitionRow(**row) for row in self._file.rows(f"SELECT {_COLUMNS} FROM transitions WHERE open = 1")]

    def transitions(self, limit: int, before: str = "") -> list[TransitionRow]:
        """Newest first; ``before``: only those older than this id."""
        where = "WHERE number < (SELECT number FROM transitions WHERE id = ?)" if before else "WHERE ? = ''"
        query = f"SELECT {_COLUMNS} FROM transitions {where} ORDER BY number DESC LIMIT ?"
        return [TransitionRow(**row) for row in self._file.rows(query, [before, limit])]

    def outcomes(self) -> dict[str, int]:
        """How many transitions have ended in each state."""
        rows = self._file.rows("SELECT state, COUNT(*) AS ended FROM transitions WHERE open IS NOT 1 GROUP BY state")
        return {row["state"]: row["ended"] for row in rows}

    def events(self, id: str) -> list[Event]:  # noqa: A002
        rows = self._file.rows(
            "SELECT sequence, state, time, message FROM events WHERE transition_id = ? AND sequence > 0 "
            "ORDER BY sequence",
            [id],
        )
        return [Event(**row) for row in rows]

    # The chain.

    @property
    def public_key(self) -> str:
        """Of the signatures that this process makes."""
        return self._key.public

    def head(self) -> Head:
        """How far the chain has come."""
        with self._file.reading() as connection:
            return chain_table.head(connection)

    def chain_page(self, after: int) -> chain_table.Page:
        """The chained events after a position, some at a time."""
        with self._file.reading() as connection:
            return chain_table.read_page(connection, after)

    def _announce_key(self, now: float) -> None:
        """Chain the public key, when it is not the one that the chain named last."""
        rows = self._file.rows("SELECT message FROM events WHERE state = ? ORDER BY position DESC LIMIT 1", [KEY_STATE])
        if rows and rows[0]["message"] == self._key.public:
            return
        with self._file.transaction(Point.COMMIT_OWNER, "key") as db:
            _chain(db, "", [Event(0, KEY_STATE, now, self._key.public)], self._key.sign)


_COLUMNS: Final = "id, request_id, request_digest, state, generation, record"


def _update(db: Database, id: str, state: str, record: str, *, is_open: bool) -> None:  # noqa: A002
    changed = db.execute(
        "UPDATE transitions SET state = ?, record = ?, open = ? WHERE id = ? AND open = 1",
        [state, record, int(is_open), id],
    ).rowcount
    assert changed == 1, f"transition {id} is not open"


def _chain(db: Database, id: str, events: Sequence[Event], sign: chain_table.Sign | None = None) -> None:  # noqa: A002
    drafts = [ChainedEvent(0, id, event.sequence, event.state, event.time, event.message, "") for event in events]
    chain_table.append(db.conn, drafts, sign)


def _owner_key(directory: Path, files: Files) -> OwnerKey:
    try:
        return OwnerKey.in_directory(directory, files)
    except KeyFileError as error:
        raise JournalError(str(error)) from error
    except OSError as error:
        raise JournalError(f"{directory}: the owner's key: {error}") from error
