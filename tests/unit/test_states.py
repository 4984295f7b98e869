"""Both state tables, over every state and every event."""

from __future__ import annotations

import itertools

import pytest

from rowlock.daemon.owner.states import (
    OWNER_TABLE,
    TERMINAL,
    TRANSITION_TABLE,
    OwnerState,
    TransitionEvent,
    TransitionState,
    next_state,
    owner_state,
)

S = TransitionState


@pytest.mark.parametrize(("state", "event"), list(itertools.product(TransitionState, TransitionEvent)))
def test_every_state_and_event(state: TransitionState, event: TransitionEvent) -> None:
    if (state, event) in TRANSITION_TABLE:
        assert next_state(state, event) is TRANSITION_TABLE[state, event]
    else:
        with pytest.raises(AssertionError, match=event):
            next_state(state, event)


def test_terminal_states_are_the_seven_named() -> None:
    assert {S.NOOP, S.PUBLISHED, S.CANCELLED, S.FAILED, S.ROLLED_BACK, S.UNLOADED, S.QUARANTINED} == TERMINAL


def reachable(start: TransitionState) -> set[TransitionState]:
    found, todo = {start}, [start]
    while todo:
        state = todo.pop()
        new = {after for (before, _), after in TRANSITION_TABLE.items() if before is state} - found
        found |= new
        todo += new
    return found


def test_every_state_is_reachable_and_every_path_can_end() -> None:
    assert reachable(S.PLANNED) == set(TransitionState)
    for state in TransitionState:
        assert reachable(state) & TERMINAL


def test_publish_only_after_verify_and_nothing_written_only_before_writes() -> None:
    assert [before for (before, _), after in TRANSITION_TABLE.items() if after is S.PUBLISHED] == [S.VERIFYING]
    before_writes = {S.PLANNED, S.STAGED, S.JOURNALED}
    for (before, _), after in TRANSITION_TABLE.items():
        if after in {S.CANCELLED, S.FAILED, S.NOOP}:
            assert before in before_writes
    for state in (S.APPLYING, S.VERIFYING, S.ROLLING_BACK):
        assert not reachable(state) & {S.CANCELLED, S.FAILED, S.NOOP}


@pytest.mark.parametrize("facts", list(itertools.product((False, True), repeat=3)))
def test_owner_state_is_derived_from_three_facts(facts: tuple[bool, bool, bool]) -> None:
    quarantined, busy, resident = facts
    state = owner_state(quarantined=quarantined, busy=busy, resident=resident)
    assert state is OWNER_TABLE[facts]
    assert (state is OwnerState.QUARANTINED) == quarantined
    if not quarantined:
        assert (state is OwnerState.READY) == (resident and not busy)
