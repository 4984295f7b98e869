"""A restart: the last published identity, or a clear reason."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from support.checkpoints import EMBED, change_rows, copy, negate
from support.owners import running_owner

from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.owner.states import OwnerState
from rowlock.journal.journal import Journal
from rowlock.journal.rows import Event, TransitionRow


def test_a_restart_loads_what_was_published_last(tiny: Path, tmp_path: Path) -> None:
    target = change_rows(tiny, tmp_path / "t", EMBED, [1], negate)
    with running_owner(tmp_path / "state", tiny) as owner:
        first, answer = owner.identity, owner.tokens()
        owner.transition(target)
        second = owner.identity
    with running_owner(tmp_path / "state", tiny) as owner:
        assert owner.identity == second
        assert owner.owner.view.resident.generation == 2  # type: ignore[union-attr]
        assert owner.rollback().rows_written == 1, "the undo outlives the process"
        assert owner.identity == first
        assert owner.tokens() == answer
    with running_owner(tmp_path / "state", None) as owner:
        assert owner.identity == first
        assert owner.owner.view.resident.generation == 3  # type: ignore[union-attr]


def test_a_checkpoint_that_is_gone_or_rewritten_leaves_the_owner_empty_with_the_reason(
    tiny: Path, tmp_path: Path
) -> None:
    base = copy(tiny, tmp_path / "base")
    with running_owner(tmp_path / "state", base) as owner:
        identity = owner.identity
    (base / "model.safetensors").rename(base / "away")
    with running_owner(tmp_path / "state", None) as owner:
        assert owner.owner.view.state is OwnerState.EMPTY
        assert "generation 1" in owner.owner.view.reason
        assert "model.safetensors" in owner.owner.view.reason
    change_rows(tiny, tmp_path / "other", EMBED, [1], negate)
    (tmp_path / "other" / "model.safetensors").rename(base / "model.safetensors")
    with running_owner(tmp_path / "state", None) as owner:
        assert owner.owner.view.state is OwnerState.EMPTY
        assert "does not hold generation 1" in owner.owner.view.reason
        assert owner.transition(base).state == "PUBLISHED"
        assert owner.identity != identity


def test_changed_assets_come_from_the_state_directory(tiny: Path, tmp_path: Path) -> None:
    base = copy(tiny, tmp_path / "base")
    with running_owner(tmp_path / "state", base) as owner:
        identity, answer = owner.identity, owner.tokens()
    (base / "generation_config.json").write_text('{"eos_token_id": 7}')
    with running_owner(tmp_path / "state", None) as owner:
        assert owner.identity == identity
        assert owner.tokens() == answer


def test_a_transition_that_was_open_is_ended_as_the_facts_are(tiny: Path, tmp_path: Path) -> None:
    """Before JOURNALED nothing was written; after it, the reload is what proves the old identity."""
    target = change_rows(tiny, tmp_path / "t", EMBED, [1], negate)
    with running_owner(tmp_path / "state", tiny) as owner:
        identity = owner.identity
        record = owner.transition(target)
        owner.rollback()
    for states, outcome in ((["PLANNED"], "FAILED"), (["PLANNED", "STAGED", "JOURNALED"], "ROLLED_BACK")):
        name = f"open-{outcome}"
        leave_open(tmp_path / "state", dataclasses.replace(record, id=name, state=states[-1], reason=""), states)
        for _ in range(2):  # recovery twice is recovery once
            with running_owner(tmp_path / "state", None) as owner:
                assert owner.identity == identity
                row = owner.owner.journal.find(name)
                assert row is not None
                assert (row.state, TransitionRecord.from_json(row.record).reason) == (outcome, "INTERRUPTED")
                assert owner.owner.journal.open_transitions() == []


def leave_open(state: Path, record: TransitionRecord, states: list[str]) -> None:
    """Write what a process leaves that dies after entering the last of these states."""
    journal, text = Journal(state, "cpu"), record.to_json()
    journal.open_transition(TransitionRow(record.id, None, "d", "PLANNED", None, text), Event(1, "PLANNED", 0.0, ""))
    for sequence, name in enumerate(states[1:], start=2):
        event = Event(sequence, name, 0.0, "")
        if name == "JOURNALED":
            journal.mark_journaled(record.id, event, lambda _: text)
        else:
            journal.move(record.id, text, event)
    journal.close()


def test_an_owner_without_checkpoint_starts_empty_and_can_load(tiny: Path, tmp_path: Path) -> None:
    with running_owner(tmp_path / "state", None) as owner:
        assert owner.owner.view.state is OwnerState.EMPTY
        assert owner.transition(tiny).state == "PUBLISHED"
        assert owner.owner.view.state is OwnerState.READY


def test_stop_during_a_transition_ends_it_in_order(tiny: Path, tmp_path: Path) -> None:
    target = change_rows(tiny, tmp_path / "t", EMBED, [1], negate)
    with running_owner(tmp_path / "state", tiny) as owner:
        identity = owner.identity
        running = owner.ask("abc", 1900)
        running.wait_token()
        transition = owner.begin(target)
    journal = Journal(tmp_path / "state", "cpu")
    row = journal.find(transition)
    assert row is not None
    assert row.state in {"CANCELLED", "PUBLISHED"}
    assert journal.open_transitions() == []
    journal.close()
    with running_owner(tmp_path / "state", None) as owner:
        assert (owner.identity == identity) == (row.state == "CANCELLED")
