"""The hash chain and its key, on real journals."""

from __future__ import annotations

import dataclasses
import sqlite3
import stat
import struct
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from support.old_journal import make_old

from rowlock.journal.audit import Auditor, Fault
from rowlock.journal.chain import START, ChainedEvent, Head, encode_rows, link_of
from rowlock.journal.chain_table import PAGE_EVENTS, Page
from rowlock.journal.files import Files
from rowlock.journal.journal import Journal
from rowlock.journal.journal_file import JournalError
from rowlock.journal.rows import Event, GenerationRow, TransitionRow
from rowlock.journal.signing import OwnerKey, is_signed


def publish(journal: Journal, id: str) -> None:
    current = journal.current()
    journal.open_transition(TransitionRow(id, None, "digest", "PLANNED", None, "{}"), Event(1, "PLANNED", 1.5, "a"))
    number = journal.mark_journaled(
        id, Event(2, "JOURNALED", 2.5, "b"), lambda generation: f'{{"g": {generation}}}', "[1]"
    )
    row = GenerationRow(
        number, id, current.generation if current else None, "p", "a", "w", "/checkpoint", "", "B2", "DURABLE"
    )
    journal.publish(row, "PUBLISHED", "{}", [Event(3, "APPLYING", 3.5, ""), Event(4, "PUBLISHED", 4.5, "c")])
    journal.amend(id, '{"ms": 1}', 5.5)


def pages(journal: Journal) -> list[Page]:
    found, last, after = [], False, 0
    while not last:
        found.append(journal.chain_page(after))
        last = found[-1].last
        after = found[-1].events[-1].event.position if found[-1].events else after
    return found


def audit(journal: Journal, **options: object) -> Auditor:
    auditor = Auditor(**options)  # type: ignore[arg-type]
    auditor.check(pages(journal))
    return auditor


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path, "cpu", now=lambda: 0.5)
    publish(journal, "one")
    publish(journal, "two")
    return journal


def test_the_link_is_what_the_documentation_says() -> None:
    """Computed here by hand, field by field: whoever reads docs/audit.md can do the same."""
    event = ChainedEvent(7, "id", 3, "PUBLISHED", 1.25, "grün", "ab" * 32)
    fields = [START, b"7", b"id", b"3", b"PUBLISHED", struct.pack("<d", 1.25), "grün".encode(), b"ab" * 32]
    text = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    assert link_of(START, event) == blake3(text, derive_key_context="rowlock v1 journal link").digest()


_EVENTS = st.builds(
    ChainedEvent,
    position=st.integers(1, 99), transition=st.text(max_size=3), sequence=st.integers(0, 99), state=st.text(max_size=3),
    time=st.floats(allow_nan=False), message=st.text(max_size=3), facts=st.text(max_size=3),
)  # fmt: skip


@given(_EVENTS, _EVENTS)
def test_two_events_never_have_one_link(one: ChainedEvent, other: ChainedEvent) -> None:
    assert (link_of(START, one) == link_of(START, other)) == (repr(one) == repr(other))


_ROWS = st.lists(st.lists(st.none() | st.integers() | st.text(max_size=2) | st.floats(allow_nan=False), max_size=3))


@given(_ROWS, _ROWS)
def test_two_sets_of_rows_never_have_one_encoding(one: list[list[object]], other: list[list[object]]) -> None:
    assert (encode_rows(one) == encode_rows(other)) == (repr(one) == repr(other))  # type: ignore[arg-type]


def test_a_good_history_has_no_problems(journal: Journal) -> None:
    found = audit(journal, pinned=frozenset({journal.public_key}), since=journal.head())
    assert found.problems == []
    assert (found.head, found.signed, found.keys) == (journal.head(), 11, [journal.public_key])
    assert Head.parse(str(found.head)) == found.head


def test_every_commit_that_ends_something_is_signed(journal: Journal) -> None:
    journal.record_quarantine("fence failed", 6.5)
    journal.release_quarantine("alice", "replaced", 7.5)
    signed = [(item.event.state, bool(item.event.signature)) for page in pages(journal) for item in page.events]
    one = [("PLANNED", False), ("JOURNALED", False), ("APPLYING", False), ("PUBLISHED", True), ("AMENDED", True)]
    assert signed == [("KEY", True), *one, *one, ("QUARANTINED", True), ("RELEASED", True)]


def test_a_history_longer_than_a_page(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "cpu")
    for number in range(PAGE_EVENTS // 5 + 1):
        publish(journal, f"t{number}")
    assert [page.last for page in pages(journal)] == [False, True]
    assert audit(journal).problems == []


def test_the_key_is_made_once_private_and_kept(journal: Journal, tmp_path: Path) -> None:
    path = tmp_path / "owner.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = journal.public_key
    journal.close()
    again = Journal(tmp_path, "cpu")
    assert again.public_key == key
    assert again.head().count == 11, "a key that the chain knows is not announced again"


def test_a_key_that_others_may_read_or_that_is_damaged_is_refused(journal: Journal, tmp_path: Path) -> None:
    journal.close()
    path = tmp_path / "owner.key"
    path.chmod(0o640)
    with pytest.raises(JournalError, match=r"owner\.key: others may use it"):
        Journal(tmp_path, "cpu")
    path.chmod(0o600)
    path.write_text("no key")
    with pytest.raises(JournalError, match=r"owner\.key: .*restore it"):
        Journal(tmp_path, "cpu")


def test_another_key_is_announced_and_found(journal: Journal, tmp_path: Path) -> None:
    journal.close()
    (tmp_path / "owner.key").unlink()
    again = Journal(tmp_path, "cpu")
    publish(again, "three")
    found = audit(again)
    assert [problem.fault for problem in found.problems] == [Fault.KEY]
    assert audit(again, pinned=frozenset(found.keys)).problems == []
    assert {item.fault for item in audit(again, pinned=frozenset(found.keys[:1])).problems} == {Fault.KEY}


def test_a_signature_is_of_one_key_and_one_text(tmp_path: Path) -> None:
    key = OwnerKey.in_directory(tmp_path, Files())
    other = OwnerKey.in_directory(tmp_path / "other", Files())
    signature = key.sign(b"text")
    assert is_signed(key.public, signature, b"text")
    assert not is_signed(key.public, signature, b"texT")
    assert not is_signed(other.public, signature, b"text")
    assert not is_signed("ed25519:zz", signature, b"text")


def test_an_older_journal_is_chained_when_it_is_opened(journal: Journal, tmp_path: Path) -> None:
    before = [journal.events("one"), journal.events("two")]
    journal.close()
    make_old(tmp_path / "journal.sqlite")
    upgraded = Journal(tmp_path, "cpu")
    assert [upgraded.events("one"), upgraded.events("two")] == before
    assert audit(upgraded).problems == []
    states = [item.event.state for page in pages(upgraded) for item in page.events]
    assert states == ["PLANNED", "JOURNALED", "APPLYING", "PUBLISHED"] * 2 + ["KEY"]
    publish(upgraded, "three")
    assert audit(upgraded).problems == []
    upgraded.close()
    with sqlite3.connect(tmp_path / "journal.sqlite") as connection:
        connection.execute("""UPDATE transitions SET record = '{"ms": 2}' WHERE id = 'one'""")
    connection.close()
    assert [item.fault for item in audit(Journal(tmp_path, "cpu")).problems] == [Fault.ROWS]


def test_looking_read_only_changes_nothing(journal: Journal, tmp_path: Path) -> None:
    journal.close()
    make_old(tmp_path / "journal.sqlite")
    (tmp_path / "owner.key").unlink()
    before = (tmp_path / "journal.sqlite").read_bytes()
    looked = Journal(tmp_path, "cpu", read_only=True)
    assert looked.current() is not None
    looked.close()
    assert (tmp_path / "journal.sqlite").read_bytes() == before
    assert not (tmp_path / "owner.key").exists()


def test_a_reader_that_leaves_out_the_end_is_found(journal: Journal) -> None:
    """Not the file but the one who reads it aloud: each page is checked for what it says of the next."""
    (page,) = pages(journal)
    short = dataclasses.replace(page, events=page.events[:-1])
    auditor = Auditor()
    auditor.check([short])
    assert [problem.fault for problem in auditor.problems] == [Fault.TRUNCATED]
