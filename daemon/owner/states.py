"""The two state tables, literal. The docs are made from them; every state x event is tested."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class TransitionState(StrEnum):
    """Where a transition stands."""

    PLANNED = "PLANNED"
    STAGED = "STAGED"
    JOURNALED = "JOURNALED"
    APPLYING = "APPLYING"
    VERIFYING = "VERIFYING"
    ROLLING_BACK = "ROLLING_BACK"
    NOOP = "NOOP"
    PUBLISHED = "PUBLISHED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    ROLLED_BACK = "ROLLED_BACK"
    UNLOADED = "UNLOADED"
    QUARANTINED = "QUARANTINED"


class TransitionEvent(StrEnum):
    """What can happen to a transition."""

    NOTHING_TO_DO = "NOTHING_TO_DO"
    STAGED = "STAGED"
    JOURNALED = "JOURNALED"
    WRITES_BEGAN = "WRITES_BEGAN"
    WRITES_FENCED = "WRITES_FENCED"
    PUBLISH_COMMITTED = "PUBLISH_COMMITTED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    OLD_PROVED = "OLD_PROVED"
    RUNTIME_CLOSED = "RUNTIME_CLOSED"
    CLOSE_FAILED = "CLOSE_FAILED"


_S, _E = TransitionState, TransitionEvent

TRANSITION_TABLE: Final[dict[tuple[TransitionState, TransitionEvent], TransitionState]] = {
    (_S.PLANNED, _E.NOTHING_TO_DO): _S.NOOP,
    (_S.PLANNED, _E.STAGED): _S.STAGED,
    (_S.PLANNED, _E.CANCELLED): _S.CANCELLED,
    (_S.PLANNED, _E.FAILED): _S.FAILED,
    (_S.STAGED, _E.JOURNALED): _S.JOURNALED,
    (_S.STAGED, _E.CANCELLED): _S.CANCELLED,
    (_S.STAGED, _E.FAILED): _S.FAILED,
    # Nothing is written yet, and the process that knows it still lives.
    (_S.JOURNALED, _E.CANCELLED): _S.CANCELLED,
    (_S.JOURNALED, _E.FAILED): _S.FAILED,
    (_S.JOURNALED, _E.WRITES_BEGAN): _S.APPLYING,
    # Recovery: the process died, so writes may have begun.
    (_S.JOURNALED, _E.OLD_PROVED): _S.ROLLED_BACK,
    (_S.JOURNALED, _E.RUNTIME_CLOSED): _S.UNLOADED,
    (_S.JOURNALED, _E.CLOSE_FAILED): _S.QUARANTINED,
    (_S.APPLYING, _E.WRITES_FENCED): _S.VERIFYING,
    (_S.APPLYING, _E.FAILED): _S.ROLLING_BACK,
    # An unload has nothing to verify.
    (_S.APPLYING, _E.RUNTIME_CLOSED): _S.UNLOADED,
    (_S.VERIFYING, _E.PUBLISH_COMMITTED): _S.PUBLISHED,
    (_S.VERIFYING, _E.FAILED): _S.ROLLING_BACK,
    (_S.ROLLING_BACK, _E.OLD_PROVED): _S.ROLLED_BACK,
    (_S.ROLLING_BACK, _E.RUNTIME_CLOSED): _S.UNLOADED,
    (_S.ROLLING_BACK, _E.CLOSE_FAILED): _S.QUARANTINED,
}
"""What is not here cannot happen: it is an assertion, not an error."""

TERMINAL: Final = frozenset(TransitionState) - {state for state, _ in TRANSITION_TABLE}


def next_state(state: TransitionState, event: TransitionEvent) -> TransitionState:
    assert (state, event) in TRANSITION_TABLE, f"{event} in {state}"
    return TRANSITION_TABLE[state, event]


class OwnerState(StrEnum):
    """What an owner is doing: derived, never stored."""

    EMPTY = "EMPTY"
    LOADING = "LOADING"
    READY = "READY"
    TRANSITIONING = "TRANSITIONING"
    QUARANTINED = "QUARANTINED"


OWNER_TABLE: Final[dict[tuple[bool, bool, bool], OwnerState]] = {
    # (quarantined, transition or load open, model resident)
    (False, False, False): OwnerState.EMPTY,
    (False, False, True): OwnerState.READY,
    (False, True, False): OwnerState.LOADING,
    (False, True, True): OwnerState.TRANSITIONING,
    (True, False, False): OwnerState.QUARANTINED,
    (True, False, True): OwnerState.QUARANTINED,
    (True, True, False): OwnerState.QUARANTINED,
    (True, True, True): OwnerState.QUARANTINED,
}


def owner_state(*, quarantined: bool, busy: bool, resident: bool) -> OwnerState:
    return OWNER_TABLE[quarantined, busy, resident]
