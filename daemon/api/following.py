"""The events of a transition, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rowlock.daemon.api.messages import event_message, record_message
from rowlock.daemon.owner.owner import Owner
from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.owner.states import TERMINAL
from rowlock.journal.rows import Event, TransitionRow
from rowlock.v1 import owner_pb2
from rowlock.v1.errors import OwnerError, Reason


async def follow(owner: Owner, transition: str, after: int = 0) -> AsyncIterator[owner_pb2.TransitionEvent]:
    """Every event after a sequence number: those in the journal, then those to come.

    The last event carries the record.

    Raises:
        OwnerError: QUARANTINED or INTERRUPTED, when this process will not end the transition.

    """
    loop, news = asyncio.get_running_loop(), asyncio.Event()

    def listener() -> None:
        loop.call_soon_threadsafe(news.set)

    owner.followers.add(transition, listener)
    try:
        while True:
            news.clear()
            live = owner.is_live(transition)
            row, events = await asyncio.to_thread(_read, owner, transition)
            for event in events:
                last = event.state in TERMINAL
                if event.sequence <= after and not last:
                    continue
                if last and live:
                    break  # its record is about to be completed
                after = event.sequence
                if not last:
                    yield event_message(transition, event, None)
                    continue
                writes = await asyncio.to_thread(owner.journal.writes, transition)
                yield event_message(transition, event, record_message(TransitionRecord.from_json(row.record), writes))
                return
            if not live:
                raise _never_ended(owner, transition)
            await news.wait()
    finally:
        owner.followers.remove(transition, listener)


def _never_ended(owner: Owner, transition: str) -> OwnerError:
    reason = owner.view.quarantined
    if reason:
        return OwnerError(Reason.QUARANTINED, f"transition {transition} has no recorded outcome: {reason}")
    return OwnerError(Reason.INTERRUPTED, f"transition {transition} has no recorded outcome yet")


def _read(owner: Owner, transition: str) -> tuple[TransitionRow, list[Event]]:
    # events first: a terminal one then has its row
    events = owner.journal.events(transition)
    row = owner.journal.find(transition)
    assert row is not None
    return row, events
