"""Rows from a trainer: no checkpoint on disk, and yet a restart has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import EMBED, NORM, Q0, change_rows, copy, negate, read_tensor
from support.owners import OwnerHarness, running_owner

from rowlock.daemon.owner.states import OwnerState
from rowlock.v1.errors import OwnerError, Reason


def rows_of(directory: Path, tensor: str, rows: list[int], width: int = 128) -> dict[int, bytes]:
    data = read_tensor(directory, tensor)
    return {row: data[row * width : (row + 1) * width] for row in rows}


@pytest.fixture
def trained(tiny: Path, tmp_path: Path) -> Path:
    """What the trainer has: a checkpoint that the owner never sees."""
    once = change_rows(tiny, tmp_path / "once", EMBED, [4, 250], negate)
    return change_rows(once, tmp_path / "trained", Q0, [0], negate)


def test_a_push_is_the_identity_of_the_checkpoint_it_would_have_been(
    owner: OwnerHarness, trained: Path, tmp_path: Path
) -> None:
    before, answer = owner.identity, owner.tokens()
    rows = {EMBED: rows_of(trained, EMBED, [250, 4, 7]), Q0: rows_of(trained, Q0, [0])}
    record = owner.push(rows)
    assert (record.state, record.kind, record.level) == ("PUBLISHED", "push", "B2")
    assert record.rows_written == 3, "row 7 was pushed as it is"
    with running_owner(tmp_path / "other", trained) as reference:
        assert owner.identity == reference.identity
        assert owner.tokens() == reference.tokens()
    assert owner.verify().ok
    assert owner.rollback().state == "PUBLISHED"
    assert (owner.identity, owner.tokens()) == (before, answer)


def test_pushed_rows_outlive_the_process_and_add_up(tiny: Path, tmp_path: Path, trained: Path) -> None:
    state = tmp_path / "state"
    with running_owner(state, tiny) as owner:
        first = owner.identity
        owner.push({EMBED: rows_of(trained, EMBED, [4, 250])})
        owner.push({Q0: rows_of(trained, Q0, [0])})
        pushed, answer = owner.identity, owner.tokens()
    with running_owner(state, None) as owner:
        assert (owner.identity, owner.tokens()) == (pushed, answer)
        assert owner.verify().ok
        assert owner.transition(trained).state == "NOOP"
        assert owner.rollback(to=1).state == "PUBLISHED"
        assert owner.identity == first
        assert owner.rollback().state == "PUBLISHED"
        assert owner.identity == pushed
    with running_owner(state, None) as owner:
        assert (owner.identity, owner.tokens()) == (pushed, answer)


def test_pushed_rows_are_kept_as_long_as_the_identity_needs_them(tiny: Path, tmp_path: Path, trained: Path) -> None:
    base = copy(tiny, tmp_path / "base")
    with running_owner(tmp_path / "state", base) as owner:
        owner.push({EMBED: rows_of(trained, EMBED, [4])})
        (overlay,) = owner.core.stores.pushed.owners()
        assert owner.owner.view.resident.overlay == overlay  # type: ignore[union-attr]
        for index in range(12):
            owner.transition((trained, tiny)[index % 2])
        assert overlay not in owner.core.stores.pushed.owners(), "no generation that is kept needs it"
    for path in (tmp_path / "state" / "pushed").iterdir():
        path.unlink()
    with running_owner(tmp_path / "state", None) as owner:
        assert owner.owner.view.state is OwnerState.READY


def test_a_rollback_to_pushed_rows_that_are_gone_is_refused(tiny: Path, tmp_path: Path, trained: Path) -> None:
    """Assets-only transitions take generations, but no undo: the chain of undos outlives none of the pushed rows."""
    toggles = [copy(trained, tmp_path / f"toggle{index}") for index in range(2)]
    (toggles[1] / "generation_config.json").write_text('{"eos_token_id": 9}')
    with running_owner(tmp_path / "state", tiny) as owner:
        owner.push({EMBED: rows_of(trained, EMBED, [4])})
        pushed = owner.identity
        owner.transition(trained)
        for index in range(11):
            owner.transition(toggles[(index + 1) % 2])
        assert owner.rollback(to=2).state == "PUBLISHED"
        assert owner.identity == pushed
        answer = owner.tokens()
    with running_owner(tmp_path / "state", None) as owner:
        assert (owner.identity, owner.tokens()) == (pushed, answer)
        owner.transition(trained)
        for path in (tmp_path / "state" / "pushed").iterdir():
            path.unlink()
        with pytest.raises(OwnerError) as caught:
            owner.rollback(to=2)
        assert caught.value.reason in {Reason.ROLLBACK_UNAVAILABLE, Reason.TARGET_CHANGED}
        assert owner.verify().ok


def test_a_restart_without_its_pushed_rows_says_so(tiny: Path, tmp_path: Path, trained: Path) -> None:
    with running_owner(tmp_path / "state", tiny) as owner:
        owner.push({EMBED: rows_of(trained, EMBED, [4])})
    for path in (tmp_path / "state" / "pushed").iterdir():
        path.unlink()
    with running_owner(tmp_path / "state", None) as owner:
        assert owner.owner.view.state is OwnerState.EMPTY
        assert "pushed rows" in owner.owner.view.reason


def test_bad_pushes_are_refused_by_field(owner: OwnerHarness) -> None:
    before = owner.identity
    cases = [
        ({"no.such.tensor": {0: b"x" * 128}}, "tensor: 'no.such.tensor'"),
        ({EMBED: {0: b"x" * 127}}, "whole rows"),
        ({EMBED: {0: b""}}, "whole rows"),
        ({EMBED: {260: b"x" * 128}}, "has 260"),
        ({EMBED: {259: b"x" * 256}}, "has 260"),
        ({NORM: {1: b"x" * 128}}, "has 1"),
        ({EMBED: {3: b"x" * 256, 4: b"x" * 128}}, "came twice"),
        ({}, "none were pushed"),
    ]
    for rows, says in cases:
        with pytest.raises(OwnerError, match=says) as caught:
            owner.push(rows)
        assert caught.value.reason is Reason.ARGUMENT_INVALID
    assert owner.identity == before


def test_a_push_of_rows_as_they_are_is_a_noop(owner: OwnerHarness, tiny: Path) -> None:
    assert owner.push({EMBED: rows_of(tiny, EMBED, [1, 2])}).state == "NOOP"


def test_a_push_over_drifted_rows_is_refused(owner: OwnerHarness, trained: Path) -> None:
    owner.stray_write("embed", 9)
    with pytest.raises(OwnerError) as caught:
        owner.push({EMBED: rows_of(trained, EMBED, [4])})
    assert caught.value.reason is Reason.DRIFT
