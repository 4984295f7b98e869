"""The hash chain over the journal's events: what is hashed, and what is signed.

Each event has a *link*: a digest of the link before it and of everything that the event
says. An event that was changed, taken out, put in or moved breaks a link. What else a
commit wrote (the transition's row, the generation it published) is bound by the event's
*facts*: a digest of those rows as that commit left them.

A signature covers a position and its link, and with them everything before.

Encoding, the same for everybody: fields in order, each as eight little-endian bytes of
length and its content; whole numbers as decimal ASCII, times as eight little-endian bytes
of an IEEE 754 double, texts as UTF-8. Digests are BLAKE3-256 with a derived key context.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

LINK_CONTEXT: Final = "rowlock v1 journal link"
FACTS_CONTEXT: Final = "rowlock v1 journal facts"
SIGNED_PREFIX: Final = b"rowlock v1 journal head\x00"
START: Final = bytes(32)
"""The link before the first event."""

KEY_STATE: Final = "KEY"
"""State of the owner's event that names the key of the signatures from there on; its message is the key."""

UNSIGNED_STATES: Final = frozenset({"PLANNED", "STAGED", "JOURNALED", "APPLYING", "VERIFYING", "ROLLING_BACK"})
"""States whose events may go without a signature: others come after them, or the transition is open."""

Value = str | int | float | None
"""What a cell of the journal holds."""


@dataclass(frozen=True)
class ChainedEvent:
    """One event in its place in the chain.

    Attributes:
        position: from 1 on, without gaps, over the whole journal.
        transition: its id; empty for an event of the owner itself.
        sequence: within the transition, from 1 on; 0 where the event only completes a record, or is the owner's.
        state: the state entered; or ``AMENDED``, ``KEY``, ``CUT``, ``QUARANTINED``, ``RELEASED``, ...
        time: seconds since the epoch.
        facts: hex digest of the rows that this commit left; empty where an upgrade chained an older event.
        link: 32 bytes.
        signature: Ed25519, 64 bytes; or empty.

    """

    position: int
    transition: str
    sequence: int
    state: str
    time: float
    message: str
    facts: str
    link: bytes = b""
    signature: bytes = b""


@dataclass(frozen=True)
class Head:
    """How far a chain has come: its number of events, and its last link."""

    count: int
    link: bytes

    def __str__(self) -> str:
        return f"{self.count}:{self.link.hex()}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """From ``COUNT:LINK``. Raises ValueError."""
        count, _, link = text.partition(":")
        head = cls(int(count), bytes.fromhex(link))
        if head.count < 0 or len(head.link) != len(START):
            raise ValueError("no head")
        return head


def link_of(previous: bytes, event: ChainedEvent) -> bytes:
    """The link of an event that follows ``previous``."""
    fields = [
        previous,
        str(event.position).encode(),
        event.transition.encode(),
        str(event.sequence).encode(),
        event.state.encode(),
        struct.pack("<d", event.time),
        event.message.encode(),
        event.facts.encode(),
    ]
    return blake3(_encode(fields), derive_key_context=LINK_CONTEXT).digest()


def signed_text(position: int, link: bytes) -> bytes:
    """What a signature is over."""
    return SIGNED_PREFIX + _encode([str(position).encode(), link])


def encode_rows(rows: Iterable[Sequence[Value]]) -> bytes:
    """Rows of the journal as bytes: each cell with its kind, each row as one field."""
    return _encode(_encode(_cell(value) for value in row) for row in rows)


def facts_of(rows: bytes) -> str:
    """Hex digest of encoded rows."""
    return blake3(rows, derive_key_context=FACTS_CONTEXT).hexdigest()


def _cell(value: Value) -> bytes:
    match value:
        case None:
            return b"n"
        case float():
            return b"f" + struct.pack("<d", value)
        case int():
            return b"i" + str(value).encode()
        case str():
            return b"t" + value.encode()


def _encode(fields: Iterable[bytes]) -> bytes:
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)
