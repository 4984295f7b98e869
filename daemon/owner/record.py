"""What is known of one transition: a value, replaced at every move, kept in the journal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.device import Counters
from rowlock.daemon.owner.context import Clock
from rowlock.journal.points import Moment, Point, Points


@dataclass(frozen=True)
class RowRange:
    """Consecutive rows of one allocation."""

    parent: str
    allocation: str
    first_row: int
    rows: int
    offset_bytes: int
    bytes: int


@dataclass(frozen=True)
class TransitionRecord:
    """One transition, as history shows it. Times are seconds since the epoch.

    Attributes:
        kind: ``load``, ``transition``, ``rollback``, ``push``, ``repair`` or ``unload``.
        generation: taken when journaled; 0 before that.
        reason: from the error table, when not published.
        phases: milliseconds by phase, in order.
        exclusive_ms: first fence to durable publish; no request runs.
        blocked_ms: closing of admission to its reopening.
        plan: summary of the plan, as JSON-able values.
        write_runs: how many runs of rows were to be written; the journal has each.
        unread_bytes: of touched allocations, not read back before the publish.
        scrub: what reading them afterwards found.
        readback: what a readback on this device proves.

    """

    id: str
    request_id: str
    kind: str
    level: str
    target: str
    state: str
    from_identity: Identity | None
    to_identity: Identity | None
    generation_from: int
    created: float
    plan: dict[str, Any]
    undo: str
    groups: int = 0
    generation: int = 0
    ended: float = 0.0
    reason: str = ""
    message: str = ""
    rows_written: int = 0
    bytes_written: int = 0
    bytes_read_back: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    drain_ms: float = 0.0
    exclusive_ms: float = 0.0
    blocked_ms: float = 0.0
    total_ms: float = 0.0
    write_runs: int = 0
    verify: str = ""
    target_check: str = ""
    unread_bytes: int = 0
    scrub: str = ""
    readback: str = ""

    def to_json(self) -> str:
        values = {item.name: getattr(self, item.name) for item in fields(self)}  # asdict would copy the plan
        return json.dumps(values, separators=(",", ":"), default=asdict)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The record of a journal row; fields that a newer version added are ignored."""
        values = json.loads(text)
        known = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        for name in ("from_identity", "to_identity"):
            known[name] = Identity(**known[name]) if known[name] else None
        return cls(**known)


class Stopwatch:
    """Milliseconds by phase.

    Args:
        clock: time.
        points: told of each phase.

    """

    def __init__(self, clock: Clock, points: Points) -> None:
        self._clock = clock
        self._points = points
        self._start = clock.monotonic()
        self.phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = self._clock.monotonic()
        self._points.at(Point.PHASE, Moment.BEFORE, name)
        try:
            yield
        finally:
            self._points.at(Point.PHASE, Moment.AFTER, name)
            self.phases[name] = round(self.phases.get(name, 0.0) + (self._clock.monotonic() - start) * 1000, 3)

    def mark(self) -> float:
        return self._clock.monotonic()

    def since(self, mark: float) -> float:
        """Milliseconds since a mark."""
        return round((self._clock.monotonic() - mark) * 1000, 3)

    @property
    def total_ms(self) -> float:
        return self.since(self._start)


def counters_json(counters: Counters) -> dict[str, int]:
    return asdict(counters)
