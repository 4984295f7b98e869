"""What a client asks for, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final

from rowlock.bindings.device import Sampling
from rowlock.daemon.owner.text import Prompt
from rowlock.v1.errors import OwnerError, Reason

STOPS_MAX: Final = 4
STOP_CHARACTERS_MAX: Final = 1000
PIN_CHARACTERS_MIN: Final = 12
SEED_MAX: Final = 2**64 - 1


@dataclass(frozen=True)
class Question:
    """One request of a client.

    Attributes:
        max_tokens: new tokens; None for what the context has left.
        stops: strings that end the answer; see :class:`rowlock.daemon.answering.stops.StopStrings`.
        ignore_eos: go on after an end-of-sequence token.
        identity: digest that has to answer, or its beginning; empty for any.
        deadline_s: seconds after which the answer is given up; None for never.

    """

    prompt: Prompt
    max_tokens: int | None
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    ignore_eos: bool = False
    identity: str = ""
    deadline_s: float | None = None


def checked_sampling(temperature: float, top_p: float, top_k: int, seed: int) -> Sampling:
    """How tokens are chosen. Raises OwnerError, naming the field."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise OwnerError(Reason.ARGUMENT_INVALID, f"temperature: {temperature} is not a number from 0 up")
    if not 0 < top_p <= 1:
        raise OwnerError(Reason.ARGUMENT_INVALID, f"top_p: {top_p} is not above 0 and at most 1")
    return Sampling(temperature, top_p, top_k, seed)


def checked_stops(stops: tuple[str, ...]) -> tuple[str, ...]:
    """Strings that end an answer. Raises OwnerError."""
    if len(stops) > STOPS_MAX:
        raise OwnerError(Reason.ARGUMENT_INVALID, f"stop: {len(stops)} strings; at most {STOPS_MAX}")
    if not all(0 < len(stop) <= STOP_CHARACTERS_MAX for stop in stops):
        raise OwnerError(Reason.ARGUMENT_INVALID, f"stop: each string has 1 to {STOP_CHARACTERS_MAX} characters")
    return stops


def checked_pin(identity: str, name: str) -> str:
    """The beginning of a digest that has to answer, or empty. Raises OwnerError, naming the field."""
    digits = set(identity) <= set("0123456789abcdef")
    if identity and not (digits and PIN_CHARACTERS_MIN <= len(identity) <= 64):
        raise OwnerError(
            Reason.ARGUMENT_INVALID,
            f"{name}: {identity[:80]!r} is not a digest, nor the first {PIN_CHARACTERS_MIN} characters of one or more",
        )
    return identity
