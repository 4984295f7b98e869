"""The chain in SQLite: adding events, and reading them with the rows that they bind.

Works on a plain connection, so that a history can be read without the daemon.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from blake3 import blake3

from rowlock.journal.chain import START, ChainedEvent, Head, encode_rows, facts_of, link_of, signed_text

PAGE_EVENTS: Final = 500

Sign = Callable[[bytes], bytes]


class Connection(Protocol):
    """As much of a SQLite connection as is used here."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> sqlite3.Cursor: ...


@dataclass(frozen=True)
class Bound:
    """A chained event, and what it binds if it is the last of its transition, or of the owner.

    Attributes:
        rows: the bound rows, encoded, as they are now; None where a later event binds them.

    """

    event: ChainedEvent
    rows: bytes | None


@dataclass(frozen=True)
class Page:
    """Some events in order, from one snapshot of the journal.

    Attributes:
        findings: on the last page: what does not fit in the tables that the events speak of.

    """

    events: tuple[Bound, ...]
    last: bool
    findings: tuple[str, ...] = ()


def head(connection: Connection) -> Head:
    """The last link."""
    row = connection.execute("SELECT position, link FROM events ORDER BY position DESC LIMIT 1").fetchone()
    return Head(row[0], row[1]) if row else Head(0, START)


def append(connection: Connection, drafts: Sequence[ChainedEvent], sign: Sign | None) -> None:
    """Chain the events of one commit; call it last in its transaction.

    Args:
        connection: inside a transaction.
        drafts: of one transition, or of the owner; position, facts, link and signature are filled in.
        sign: signs the last of them; None leaves them unsigned.

    """
    last = head(connection)
    position, link = last.count, last.link
    facts = facts_of(bound_rows(connection, drafts[-1].transition))
    for index, draft in enumerate(drafts):
        position += 1
        event = replace(draft, position=position, facts=facts)
        link = link_of(link, event)
        signature = sign(signed_text(position, link)) if sign and index == len(drafts) - 1 else b""
        insert(connection, replace(event, link=link, signature=signature))


def insert(connection: Connection, event: ChainedEvent) -> None:
    connection.execute(
        "INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        list({**vars(event), "transition": event.transition or None}.values()),
    )


def bound_rows(connection: Connection, transition: str) -> bytes:
    """The rows that the last event of a transition binds; of the owner, if it is empty."""
    tables = _TRANSITION_TABLES if transition else _OWNER_TABLES
    rows: list[Sequence[Any]] = []
    for name, query in tables:
        rows += [(name, *row) for row in connection.execute(query, [transition]).fetchall()]
    return encode_rows(rows)


def read_page(connection: Connection, after: int) -> Page:
    """The events after a position, at most :data:`PAGE_EVENTS`.

    Raises:
        sqlite3.Error: the journal cannot be read.

    """
    connection.execute("BEGIN")
    try:
        found = connection.execute(
            "SELECT e.position, coalesce(e.transition_id, ''), e.sequence, e.state, e.time, e.message, e.facts, "
            "e.link, e.signature, e.position = (SELECT max(position) FROM events l "
            "WHERE l.transition_id IS e.transition_id) "
            "FROM events e WHERE e.position > ? ORDER BY e.position LIMIT ?",
            [after, PAGE_EVENTS],
        ).fetchall()
        events = tuple(
            Bound(ChainedEvent(*row[:-1]), bound_rows(connection, row[1]) if row[-1] else None) for row in found
        )
        last = len(events) < PAGE_EVENTS
        return Page(events, last, tuple(_findings(connection)) if last else ())
    finally:
        connection.execute("ROLLBACK")


def writes_digest(runs: str) -> str:
    """Of the exact rows of a transition: kept beside them, and bound by its events."""
    return blake3(runs.encode(), derive_key_context="rowlock v1 journal writes").hexdigest()


def _findings(connection: Connection) -> Iterator[str]:
    """What the tables hold that no event speaks of."""
    for table, column in (("transitions", "id"), ("generations", "transition_id"), ("writes", "transition_id")):
        query = (
            f"SELECT {column} FROM {table} WHERE {column} NOT IN (SELECT transition_id FROM events WHERE sequence > 0)"
        )
        for (name,) in connection.execute(query):
            yield f"{table}: no event speaks of {name}"
    current, newest = connection.execute(
        "SELECT current_generation, (SELECT max(generation) FROM generations) FROM owner"
    ).fetchone()
    if current != newest:
        yield f"owner: generation {current} is said to be current, {newest} was published last"
    for name, runs, digest in connection.execute("SELECT transition_id, runs, digest FROM writes"):
        if writes_digest(runs) != digest:
            yield f"writes: the rows of {name} are not those that were journaled"


_TRANSITION_TABLES: Final = (
    (
        "transition",
        "SELECT id, number, request_id, request_digest, state, open, generation, record FROM transitions WHERE id = ?",
    ),
    (
        "generation",
        (
            "SELECT generation, transition_id, previous, program, assets, weights, checkpoint, overlay, level, undo "
            "FROM generations WHERE transition_id = ? ORDER BY generation"
        ),
    ),
    ("writes", "SELECT digest FROM writes WHERE transition_id = ?"),
)
_OWNER_TABLES: Final = (
    ("quarantine", "SELECT since, reason, released, who, why FROM quarantine WHERE '' = ? ORDER BY rowid"),
    ("cut", "SELECT transition_id FROM cuts WHERE '' = ? ORDER BY transition_id"),
)
