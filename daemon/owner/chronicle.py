"""The story of one transition: its state, its record, and the journal's rows of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rowlock.daemon.owner.context import Clock
from rowlock.daemon.owner.record import RowRange, TransitionRecord
from rowlock.daemon.owner.states import TERMINAL, TransitionEvent, TransitionState, next_state
from rowlock.journal.journal import Journal
from rowlock.journal.journal_file import CommitUnknownError, JournalError
from rowlock.journal.rows import Event, GenerationRow, TransitionRow


class Chronicle:
    """Moves one transition through the state table, durably.

    States entered inside the exclusive section are only noted; they are written with the
    terminal commit, which is the only one there.
    """

    def __init__(self, journal: Journal, clock: Clock, record: TransitionRecord, notify: Callable[[str], None]) -> None:
        self._journal = journal
        self._clock = clock
        self._notify = notify
        self._sequence = 0
        self._noted: list[Event] = []
        self.record = record
        self.state = TransitionState(record.state)

    @classmethod
    def resumed(
        cls, journal: Journal, clock: Clock, record: TransitionRecord, notify: Callable[[str], None]
    ) -> Chronicle:
        """The story of a transition that another process began."""
        chronicle = cls(journal, clock, record, notify)
        chronicle._sequence = max((event.sequence for event in journal.events(record.id)), default=0)
        return chronicle

    def open(self, request_digest: str) -> None:
        record = self.record
        row = TransitionRow(record.id, record.request_id or None, request_digest, record.state, None, record.to_json())
        event = self._event(self.state, f"{record.level} to {record.target}" if record.target else record.kind)
        try:
            self._journal.open_transition(row, event)
        except CommitUnknownError:
            if not self._journal.settle(record.id):
                raise
        self._notify(record.id)

    def stage(self, message: str, **changes: Any) -> None:
        with self._settled():
            self._enter(TransitionEvent.STAGED, changes)
            self._journal.move(self.record.id, self.record.to_json(), self._event(self.state, message))
        self._notify(self.record.id)

    def journal_intent(self, message: str, ranges: Sequence[RowRange]) -> None:
        """Take a generation and make the intent durable: the last step before device writes."""
        writes = json.dumps([list(vars(item).values()) for item in ranges])

        def record_of(generation: int) -> str:
            self.record = replace(self.record, generation=generation)
            return self.record.to_json()

        with self._settled():
            self._enter(TransitionEvent.JOURNALED, {"write_runs": len(ranges)})
            self._journal.mark_journaled(self.record.id, self._event(self.state, message), record_of, writes)

    def note(self, event: TransitionEvent, message: str) -> None:
        """Enter a state whose event is written with the terminal commit."""
        self._enter(event, {})
        self._noted.append(self._event(self.state, message))

    def publish(self, row: GenerationRow, message: str, **changes: Any) -> None:
        """The single durable step that makes the target the owner's identity.

        Raises:
            JournalError: it did not happen, for certain.
            CommitUnknownError: nobody knows whether it happened.

        """
        before, state = self.record, self.state
        self._enter(TransitionEvent.PUBLISH_COMMITTED, {**changes, "ended": self._clock.now()})
        events = [*self._noted, self._event(self.state, message)]
        try:
            self._journal.publish(row, self.state, self.record.to_json(), events)
        except CommitUnknownError as unknown:
            published = self.state
            self._go_back(before, state)
            if self._settled_state(unknown) != published:
                raise JournalError(f"not published: {unknown}") from unknown
            self._enter(TransitionEvent.PUBLISH_COMMITTED, {**changes, "ended": self._clock.now()})
        except JournalError:
            self._go_back(before, state)
            raise

    def end(self, event: TransitionEvent, outcome: str, **changes: Any) -> None:
        """Enter a terminal state, durably; retried once on a reopened journal.

        Raises:
            JournalError: it could not be written.

        """
        self._enter(event, {**changes, "ended": self._clock.now()})
        assert self.state in TERMINAL
        events = [*self._noted, self._event(self.state, outcome)]
        try:
            self._journal.end(self.record.id, self.state, self.record.to_json(), events)
        except JournalError:
            self._journal.drop_ballast()  # the disk may be full: that is what it is kept for
            if self._journal.settle(self.record.id) != self.state:
                self._journal.end(self.record.id, self.state, self.record.to_json(), self._after_the_last(events))

    def amend(self, **changes: Any) -> None:
        """Complete the record of an ended transition, e.g. by how long its last commit took."""
        self.record = replace(self.record, **changes)
        self._journal.amend(self.record.id, self.record.to_json(), self._clock.now())

    def _after_the_last(self, events: Sequence[Event]) -> list[Event]:
        """Events with numbers that follow those in the journal: a step that was never settled may have left one."""
        last = max((event.sequence for event in self._journal.events(self.record.id)), default=0)
        return [replace(event, sequence=last + number) for number, event in enumerate(events, start=1)]

    def _settled_state(self, unknown: CommitUnknownError) -> str:
        try:
            return self._journal.settle(self.record.id)
        except JournalError as error:
            raise CommitUnknownError(f"{unknown}; it could not be settled: {error}") from error

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Be where one was before, when the journal did not take the step, or nobody knows whether it did."""
        record, state = self.record, self.state
        try:
            yield
        except CommitUnknownError as unknown:
            after, entered = self.record, self.state
            self._go_back(record, state)
            if self._settled_state(unknown) != entered:
                raise JournalError(f"not recorded: {unknown}") from unknown
            self.record, self.state = after, entered
            self._sequence += 1
        except JournalError:
            self._go_back(record, state)
            raise

    def _go_back(self, record: TransitionRecord, state: TransitionState) -> None:
        self.record, self.state = record, state
        self._sequence -= 1

    def _enter(self, event: TransitionEvent, changes: dict[str, Any]) -> None:
        self.state = next_state(self.state, event)
        self.record = replace(self.record, state=self.state.value, **changes)

    def _event(self, state: TransitionState, message: str) -> Event:
        self._sequence += 1
        return Event(self._sequence, state.value, self._clock.now(), message)
