"""The journal, on real SQLite files."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from rowlock.journal.journal import Journal
from rowlock.journal.journal_file import CommitUnknownError, JournalError
from rowlock.journal.rows import Event, GenerationRow, TransitionRow


def row(id: str, request_id: str | None = None) -> TransitionRow:
    return TransitionRow(id, request_id, "digest", "PLANNED", None, "{}")


def event(sequence: int, state: str) -> Event:
    return Event(sequence, state, 1.5, f"message {sequence}")


def generation_row(number: int, transition: str, previous: int | None = None) -> GenerationRow:
    return GenerationRow(number, transition, previous, "p", "a", "w", "/checkpoint", "", "B2", "DURABLE")


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path, "cpu")


def published(journal: Journal, id: str) -> int:
    journal.open_transition(row(id), event(1, "PLANNED"))
    number = journal.mark_journaled(id, event(2, "JOURNALED"), lambda generation: f'{{"g": {generation}}}')
    current = journal.current()
    journal.publish(
        generation_row(number, id, current.generation if current else None), "PUBLISHED", "{}", [event(3, "PUBLISHED")]
    )
    return number


def test_a_life_from_open_to_published(journal: Journal, tmp_path: Path) -> None:
    assert journal.current() is None
    first, second = published(journal, "a"), published(journal, "b")
    assert second > first
    journal.close()
    again = Journal(tmp_path, "cpu")
    current = again.current()
    assert current is not None
    assert (current.generation, current.previous) == (second, first)
    assert [item.state for item in again.events("b")] == ["PLANNED", "JOURNALED", "PUBLISHED"]
    assert [item.id for item in again.transitions(10)] == ["b", "a"]
    assert [item.id for item in again.transitions(10, before="b")] == ["a"]
    assert again.open_transitions() == []


def test_generations_never_repeat_also_when_a_transition_fails(journal: Journal) -> None:
    taken = []
    for name in "abc":
        journal.open_transition(row(name), event(1, "PLANNED"))
        taken.append(journal.mark_journaled(name, event(2, "JOURNALED"), str))
        journal.end(name, "FAILED", "{}", [event(3, "FAILED")])
    assert taken == sorted(set(taken))
    assert journal.current() is None


def test_only_one_transition_is_open(journal: Journal) -> None:
    journal.open_transition(row("a"), event(1, "PLANNED"))
    with pytest.raises(JournalError, match="UNIQUE"):
        journal.open_transition(row("b"), event(1, "PLANNED"))
    assert journal.find("b") is None
    assert journal.events("b") == []


def test_a_request_id_names_one_transition(journal: Journal) -> None:
    journal.open_transition(row("a", "r1"), event(1, "PLANNED"))
    journal.end("a", "FAILED", "{}", [event(2, "FAILED")])
    found = journal.find("r1")
    assert found is not None
    assert found.id == "a"
    with pytest.raises(JournalError, match="UNIQUE"):
        journal.open_transition(row("b", "r1"), event(1, "PLANNED"))


def test_an_ended_transition_cannot_move(journal: Journal) -> None:
    published(journal, "a")
    with pytest.raises(AssertionError, match="not open"):
        journal.move("a", "{}", event(4, "STAGED"))
    assert [item.state for item in journal.events("a")][-1] == "PUBLISHED"


def test_publish_is_all_or_nothing(journal: Journal) -> None:
    """A publish whose last statement fails leaves no trace."""
    first = published(journal, "a")
    journal.open_transition(row("b"), event(1, "PLANNED"))
    with pytest.raises(JournalError):
        journal.publish(generation_row(first, "b"), "PUBLISHED", "{}", [event(2, "PUBLISHED")])
    assert [item.state for item in journal.events("b")] == ["PLANNED"]
    current = journal.current()
    assert current is not None
    assert current.transition_id == "a"
    assert [item.id for item in journal.open_transitions()] == ["b"]


def test_another_device_is_refused(journal: Journal, tmp_path: Path) -> None:
    journal.close()
    with pytest.raises(JournalError, match="belongs to device 'cpu'"):
        Journal(tmp_path, "cuda:0")


def test_a_newer_journal_is_refused_unchanged(journal: Journal, tmp_path: Path) -> None:
    journal.close()
    path = tmp_path / "journal.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('rowlock', 'm999_future', 'x')"
        )
    connection.close()
    with pytest.raises(JournalError, match="newer rowlock"):
        Journal(tmp_path, "cpu")


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        Journal(tmp_path, "cpu")


def test_quarantine_outlives_the_process_until_it_is_released(journal: Journal, tmp_path: Path) -> None:
    assert journal.quarantine() == ""
    journal.record_quarantine("fence failed", 1.0)
    journal.close()
    again = Journal(tmp_path, "cpu")
    assert again.quarantine() == "fence failed"
    again.release_quarantine("alice", "replaced the card", 2.0)
    assert again.quarantine() == ""


def test_settling_a_transition_that_is_not_there(journal: Journal) -> None:
    assert journal.settle("nope") == ""


class _FailingCommit:
    """A connection whose COMMIT raises, after or before it took effect."""

    def __init__(self, inner: sqlite3.Connection, *, committed: bool) -> None:
        self._inner = inner
        self._committed = committed

    def execute(self, sql: str, *parameters: object) -> sqlite3.Cursor:
        if sql == "COMMIT":
            if self._committed:
                self._inner.execute(sql)
            raise sqlite3.OperationalError("disk I/O error")
        return self._inner.execute(sql, *parameters)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.mark.parametrize("committed", [True, False])
def test_an_unknown_commit_is_settled_on_a_reopened_connection(journal: Journal, committed: bool) -> None:
    journal.open_transition(row("a"), event(1, "PLANNED"))
    real = journal._file._db.conn
    journal._file._db.conn = _FailingCommit(real, committed=committed)  # type: ignore[assignment]
    with pytest.raises(CommitUnknownError):
        journal.move("a", "{}", event(2, "STAGED"))
    real.close()
    assert journal.settle("a") == ("STAGED" if committed else "PLANNED")
    assert [item.state for item in journal.events("a")] == ["PLANNED", "STAGED"][: 1 + committed]
