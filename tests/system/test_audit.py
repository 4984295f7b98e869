"""`rowlock history --verify`, on a real journal that somebody has been at."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.commands import Finished, rowlock
from support.daemons import states, transition
from support.owners import running_owner

from rowlock.cli.daemon_process import DaemonProcess
from rowlock.daemon.owner.retention import Retention
from rowlock.journal.chain import START, link_of, signed_text
from rowlock.journal.chain_table import read_page
from rowlock.journal.files import Files
from rowlock.journal.signing import OwnerKey
from rowlock.v1 import owner_pb2


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> tuple[Path, list[str]]:
    """The state directory of a daemon that loaded, moved, failed and went back; and the heads it said on the way."""
    directory = tmp_path_factory.mktemp("audit")
    target = change_rows(tiny, directory / "target", EMBED, [5, 200], negate)
    fault, heads = directory / "fault.json", []
    options = ["--checkpoint", str(tiny), "--test-fault-file", str(fault), "--threads", "1"]
    with DaemonProcess(directory / "state", options) as daemon:

        def note_head() -> None:
            heads.append(rowlock("history", "--head", endpoint=daemon.client.endpoint).out.strip())

        note_head()
        assert states(transition(daemon, target=str(target)))[-1] == "PUBLISHED"
        note_head()
        fault.write_text(json.dumps({"operation": "write", "effect": "flip"}))
        assert states(transition(daemon, target=str(tiny)))[-1] == "ROLLED_BACK"
        list(daemon.client.stream(daemon.client.owner.Rollback, owner_pb2.RollbackRequest()))
        note_head()
        live = rowlock("history", "--verify", "--json", "--since", heads[1], endpoint=daemon.client.endpoint)
        assert (live.code, live.json["problems"]) == (0, [])
        assert live.json["head"] == heads[-1]
    return directory / "state", heads


@contextmanager
def edited(state: Path, tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """A copy of the state directory under ``tmp_path``, to be changed."""
    shutil.copytree(state, tmp_path / "state")
    connection = sqlite3.connect(tmp_path / "state" / "journal.sqlite")
    yield connection
    connection.commit()
    connection.close()


def verify(state: Path, *options: str) -> Finished:
    return rowlock("history", "--verify", "--json", "--state", state, *options)


def relink(connection: sqlite3.Connection, sign: Callable[[bytes], bytes] | None = None) -> None:
    """Do what somebody would who may write the journal: compute every link again; sign again with a key, if any."""
    connection.commit()
    link = START
    for bound in read_page(connection, 0).events:
        event = bound.event
        link = link_of(link, event)
        signature = sign(signed_text(event.position, link)) if sign and event.signature else event.signature
        connection.execute(
            "UPDATE events SET link = ?, signature = ? WHERE position = ?", [link, signature, event.position]
        )
    connection.commit()


def test_a_good_history_and_its_json_form(history: tuple[Path, list[str]]) -> None:
    state, heads = history
    found = verify(state, "--since", heads[0])
    assert found.code == 0
    document = found.json
    assert set(document) == {"ok", "head", "count", "signed", "public_keys", "since", "problems"}
    assert (document["ok"], document["head"], document["since"]) == (True, heads[-1], heads[0])
    assert document["count"] == document["signed"] == int(heads[-1].split(":")[0])
    assert document["problems"] == []
    pinned = verify(state, "--key", document["public_keys"][0])
    assert pinned.code == 0
    assert rowlock("history", "--verify", "--state", state).out.splitlines()[0].endswith("events: as it was written")


EDITS = {
    "a message": ("UPDATE events SET message = 'other' WHERE position = 3", {"CHANGED"}),
    "a state": ("UPDATE events SET state = 'CANCELLED' WHERE state = 'ROLLED_BACK'", {"CHANGED", "SIGNATURE"}),
    "a time": ("UPDATE events SET time = time + 1 WHERE position = 4", {"CHANGED"}),
    "an event removed": ("DELETE FROM events WHERE position = 3", {"MISSING"}),
    "two events exchanged": (
        """
        UPDATE events SET position = -7 + position WHERE position IN (3, 4);
        UPDATE events SET position = -position WHERE position < 0;
        """,
        {"CHANGED"},
    ),
    "an event put in": (
        """
        INSERT INTO events SELECT position + 1, transition_id, 77, state, time, message, facts, link, x'' FROM events
        ORDER BY position DESC LIMIT 1
        """,
        {"CHANGED", "SIGNATURE"},
    ),
    "the last events removed": ("DELETE FROM events WHERE position > (SELECT max(position) FROM events) - 2", {"ROWS"}),
    "a signature removed": ("UPDATE events SET signature = x'' WHERE state = 'PUBLISHED'", {"SIGNATURE"}),
    "a record": ("UPDATE transitions SET record = replace(record, 'rollback', 'transition')", {"ROWS"}),
    "an outcome": ("UPDATE transitions SET state = 'PUBLISHED' WHERE state = 'ROLLED_BACK'", {"ROWS"}),
    "an identity": ("UPDATE generations SET weights = 'ff' WHERE generation = 2", {"ROWS"}),
    "the current generation": ("UPDATE owner SET current_generation = 1", {"ROWS"}),
    "the rows that were written": ("UPDATE writes SET runs = '[]'", {"ROWS"}),
    "a quarantine put in": ("INSERT INTO quarantine (since, reason) VALUES (1, 'x')", {"ROWS"}),
    "a transition removed": (
        """
        DELETE FROM writes WHERE transition_id IN (SELECT id FROM transitions WHERE state = 'ROLLED_BACK');
        DELETE FROM transitions WHERE state = 'ROLLED_BACK';
        """,
        {"ROWS"},
    ),
    "a transition put in": (
        "INSERT INTO transitions VALUES ('new', 99, NULL, '', 'PUBLISHED', 0, NULL, '{}')",
        {"ROWS"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_history_is_found(history: tuple[Path, list[str]], tmp_path: Path, name: str) -> None:
    script, faults = EDITS[name]
    with edited(history[0], tmp_path) as connection:
        connection.executescript(script)
    found = verify(tmp_path / "state")
    assert (found.code, found.json["ok"]) == (7, False)
    assert {problem["fault"] for problem in found.json["problems"]} == faults


def test_links_computed_again_do_not_match_the_signatures(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    with edited(history[0], tmp_path) as connection:
        connection.execute("UPDATE events SET message = 'other' WHERE position = 3")
        relink(connection)
    found = verify(tmp_path / "state")
    assert {problem["fault"] for problem in found.json["problems"]} == {"SIGNATURE"}
    assert found.json["signed"] == 1, "what precedes the edit is still covered"


def test_what_only_a_noted_head_or_a_pinned_key_finds(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    """The newest transitions taken out whole, or all of it signed anew: nothing in the file says so."""
    state, heads = history
    keep = int(heads[1].split(":")[0])
    with edited(state, tmp_path) as connection:
        gone = f"(SELECT transition_id FROM events WHERE position > {keep})"
        connection.executescript(
            f"UPDATE owner SET current_generation = 2;"
            f"DELETE FROM writes WHERE transition_id IN {gone}; DELETE FROM generations WHERE transition_id IN {gone};"
            f"DELETE FROM transitions WHERE id IN {gone}; DELETE FROM events WHERE position > {keep}"
        )
    assert verify(tmp_path / "state").code == 0
    truncated = verify(tmp_path / "state", "--since", heads[-1])
    assert (truncated.code, truncated.json["problems"][0]["fault"]) == (7, "TRUNCATED")
    assert verify(tmp_path / "state", "--since", heads[1]).code == 0

    own = verify(state).json["public_keys"][0]
    forger = OwnerKey.in_directory(tmp_path / "forger", Files())
    with edited(state, tmp_path / "again") as connection:
        connection.execute("UPDATE events SET message = ? WHERE state = 'KEY'", [forger.public])
        relink(connection, forger.sign)
    assert verify(tmp_path / "again" / "state").code == 0
    assert verify(tmp_path / "again" / "state", "--since", heads[0]).json["problems"][0]["fault"] == "TRUNCATED"
    assert verify(tmp_path / "again" / "state", "--key", own).json["problems"][0]["fault"] == "KEY"


def test_a_daemon_on_an_edited_journal_is_not_believed(
    history: tuple[Path, list[str]], tmp_path: Path, tiny: Path
) -> None:
    """The client computes the links itself; the daemon says nothing of it."""
    with edited(history[0], tmp_path) as connection:
        connection.execute("UPDATE events SET message = 'other' WHERE position = 3")
        connection.execute("UPDATE transitions SET record = replace(record, 'rollback', 'transition')")
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(tiny), "--threads", "1"]) as daemon:
        found = rowlock("history", "--verify", "--json", endpoint=daemon.client.endpoint)
    assert found.code == 7
    assert {problem["fault"] for problem in found.json["problems"]} == {"CHANGED", "ROWS"}


def test_what_retention_lets_go_is_a_signed_cut_and_the_offered_rollback_stays(tiny: Path, tmp_path: Path) -> None:
    targets = [change_rows(tiny, tmp_path / f"t{row}", EMBED, [row], negate) for row in range(4)]
    small = Retention(undo_generations=3, undo_bytes=1)
    with running_owner(tmp_path / "state", tiny, retention=small) as owner:
        records = [owner.transition(target) for target in targets]
        assert owner.core.stores.undo.owners() == {records[-1].id}
        cuts = [bound.event for bound in owner.owner.journal.chain_page(0).events if bound.event.state == "CUT"]
        assert [event.message for event in cuts] == [
            f"the undo of generation {number} is let go" for number in (2, 3, 4)
        ]
        assert all(event.signature for event in cuts)
        assert verify(tmp_path / "state").json["problems"] == []
        targets[2].rename(tmp_path / "away")
        back = owner.rollback()
        assert (back.state, back.rows_written) == ("PUBLISHED", 2), "from the undo: the checkpoint is away"
        assert owner.rollback(to=2).state == "PUBLISHED", "from its checkpoint: the undos in between are let go"
    with running_owner(tmp_path / "state", None, retention=small) as owner:
        assert owner.verify().ok
        assert verify(tmp_path / "state").json["problems"] == []
    with sqlite3.connect(tmp_path / "state" / "journal.sqlite") as connection:
        connection.execute("DELETE FROM cuts")
    connection.close()
    assert {problem["fault"] for problem in verify(tmp_path / "state").json["problems"]} == {"ROWS"}


def test_wrong_use_says_what_is_wanted(tmp_path: Path) -> None:
    assert "COUNT:LINK" in rowlock("history", "--verify", "--since", "7").err
    assert rowlock("history", "--since", "1:" + "00" * 32).code == 2
    nothing = rowlock("history", "--verify", "--state", tmp_path)
    assert (nothing.code, "there is no journal" in nothing.err) == (3, True)


def test_relinking_an_untouched_history_changes_nothing(history: tuple[Path, list[str]], tmp_path: Path) -> None:
    """The forger of these tests computes the very links that the daemon computed."""
    with edited(history[0], tmp_path) as connection:
        before = [bound.event for bound in read_page(connection, 0).events]
        relink(connection)
        assert [bound.event for bound in read_page(connection, 0).events] == before
        assert replace(before[0], message="x") != before[0]
