"""Checking a history: nothing that its chain or its reader says about itself is believed.

Links are computed again from what each event says, signatures are checked against the
owner's public keys, and the rows that an event binds are digested again. Only what a head
that was noted before (``since``) or a pinned key vouches for is beyond somebody who can
write the whole journal anew; see docs/audit.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from rowlock.journal.chain import KEY_STATE, START, UNSIGNED_STATES, ChainedEvent, Head, facts_of, link_of, signed_text
from rowlock.journal.chain_table import Page
from rowlock.journal.signing import is_signed


class Fault(StrEnum):
    """What can be wrong with a history."""

    CHANGED = "CHANGED"
    """An event is not what was chained in its place: edited, moved or put in."""
    MISSING = "MISSING"
    """Events were taken out."""
    TRUNCATED = "TRUNCATED"
    """It ends before, or differs at, the head that was given; or the rows of an event are gone."""
    SIGNATURE = "SIGNATURE"
    """A signature is missing or is not the owner's."""
    KEY = "KEY"
    """It is signed with a key that was not expected."""
    ROWS = "ROWS"
    """The journal's tables hold something else than what its events bind."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, at a position of the chain; 0 is the history as a whole."""

    fault: Fault
    position: int
    detail: str


@dataclass
class Auditor:
    """Checks the pages of one history, in order.

    Attributes:
        pinned: public keys that may have signed; if empty, one key alone may have.
        since: a head noted before, which this history must have grown from.
        signed: the last position that a good signature covers.

    """

    pinned: frozenset[str] = frozenset()
    since: Head | None = None
    head: Head = field(default_factory=lambda: Head(0, START))
    signed: int = 0
    keys: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    _last: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """By transition: the last event seen, and whether its rows came with it."""

    def check(self, pages: Iterable[Page]) -> None:
        """All of a history. Problems are collected, not raised."""
        for page in pages:
            for bound in page.events:
                self._check_event(bound.event)
                self._check_rows(bound.event, bound.rows)
            for finding in page.findings:
                self._report(Fault.ROWS, 0, finding)
        self._check_end()

    def _check_event(self, event: ChainedEvent) -> None:
        expected = self.head.count + 1
        if event.position != expected:
            self._report(Fault.MISSING, expected, f"events {expected} to {event.position - 1} are not there")
        elif link_of(self.head.link, event) != event.link:
            self._report(
                Fault.CHANGED, event.position, f"{_name(event)}: is not the event that was chained in this place"
            )
        if event.state == KEY_STATE:
            self._check_key(event)
        self._check_signature(event)
        self.head = Head(event.position, event.link)
        if self.since is not None and self.since.count == event.position and self.since.link != event.link:
            self._report(Fault.TRUNCATED, event.position, "this history did not grow from the head that was given")

    def _check_key(self, event: ChainedEvent) -> None:
        """A key is named by an event that it signs itself; whether it is the owner's, only a pin can say."""
        known = event.message in self.keys
        if self.pinned and event.message not in self.pinned:
            self._report(Fault.KEY, event.position, f"{event.message} is not among the keys that were given")
        elif not self.pinned and self.keys and not known:
            self._report(
                Fault.KEY, event.position, f"the owner's key became {event.message}; give the keys that may be"
            )
        if not known:
            self.keys.append(event.message)

    def _check_signature(self, event: ChainedEvent) -> None:
        if not event.signature:
            if self.keys and event.state not in UNSIGNED_STATES:
                self._report(Fault.SIGNATURE, event.position, f"{_name(event)}: has to be signed, and is not")
        elif not self.keys or not is_signed(
            self.keys[-1], event.signature, signed_text(event.position, link_of(self.head.link, event))
        ):
            self._report(Fault.SIGNATURE, event.position, f"{_name(event)}: its signature is not the owner's")
        else:
            self.signed = event.position

    def _check_rows(self, event: ChainedEvent, rows: bytes | None) -> None:
        if rows is not None and event.facts and facts_of(rows) != event.facts:
            self._report(Fault.ROWS, event.position, f"{_name(event)}: its rows in the journal are not those it left")
        self._last[event.transition] = event.position, rows is not None

    def _check_end(self) -> None:
        for transition, (position, with_rows) in self._last.items():
            if not with_rows:
                name = f"transition {transition}" if transition else "the owner"
                self._report(Fault.TRUNCATED, position, f"later events of {name} are not there")
        if not self.keys:
            self._report(Fault.SIGNATURE, 0, "nothing is signed")
        if self.since is not None and self.head.count < self.since.count:
            self._report(Fault.TRUNCATED, self.head.count, f"ends at {self.head.count}, before {self.since.count}")

    def _report(self, fault: Fault, position: int, detail: str) -> None:
        self.problems.append(Problem(fault, position, detail))


def _name(event: ChainedEvent) -> str:
    return f"event {event.position}, {event.state}" + (f" of {event.transition}" if event.transition else "")
