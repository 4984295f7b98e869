"""The rows of a journal, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One state move of a transition.

    Attributes:
        sequence: from 1 on, without gaps, within the transition.
        state: the state entered.
        time: seconds since the epoch.

    """

    sequence: int
    state: str
    time: float
    message: str


@dataclass(frozen=True)
class TransitionRow:
    """One transition; ``record`` is the owner's JSON text, opaque here."""

    id: str
    request_id: str | None
    request_digest: str
    state: str
    generation: int | None
    record: str


@dataclass(frozen=True)
class GenerationRow:
    """One published identity.

    Attributes:
        transition_id: what published it.
        previous: the generation before it, None for the first.
        checkpoint: directory that it can be rebuilt from.
        overlay: name of the file of pushed rows that lie over that checkpoint, or empty.
        level: of that transition, ``B1`` or ``B2``.
        undo: where the before-images are: ``NONE``, ``DURABLE`` or ``MEMORY``.

    """

    generation: int
    transition_id: str
    previous: int | None
    program: str
    assets: str
    weights: str
    checkpoint: str
    overlay: str
    level: str
    undo: str
