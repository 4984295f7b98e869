"""Where a history to be checked comes from: a daemon, or a state directory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rowlock.cli.client import EXIT_REFUSED, Client, ClientError
from rowlock.journal.audit import Auditor
from rowlock.journal.chain import ChainedEvent, Head
from rowlock.journal.chain_table import Bound, Page, read_page
from rowlock.v1 import owner_pb2

JOURNAL = "journal.sqlite"


def pages_of_daemon(client: Client) -> Iterator[Page]:
    """What a daemon says its chain is. Raises ClientError, also when it says nothing to the end."""
    complete = False
    for answer in client.stream(client.owner.ReadHistory, owner_pb2.ReadHistoryRequest()):
        if answer.HasField("event"):
            fields = {field.name: getattr(answer.event, field.name) for field in answer.event.DESCRIPTOR.fields}
            yield Page((Bound(ChainedEvent(**fields), answer.rows if answer.HasField("rows") else None),), last=False)
        else:
            complete = True
            yield Page((), last=True, findings=tuple(answer.findings))
    if not complete:
        raise ClientError("the history ended without its last message", EXIT_REFUSED, "try again")


def pages_of_directory(state: Path) -> Iterator[Page]:
    """The chain of a state directory, read without its daemon. Raises ClientError."""
    path = state / JOURNAL
    if not path.is_file():
        raise ClientError(f"{path}: there is no journal", EXIT_REFUSED, "give the daemon's state directory")
    try:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
        try:
            yield from _pages(connection)
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise ClientError(
            f"{path}: {error}", EXIT_REFUSED, "a journal before the chain gets one when its daemon starts"
        ) from error


def report(auditor: Auditor) -> dict[str, Any]:
    """The JSON form of a check; see docs/audit.md."""
    return {
        "ok": not auditor.problems,
        "head": str(auditor.head),
        "count": auditor.head.count,
        "signed": auditor.signed,
        "public_keys": auditor.keys,
        "since": str(auditor.since) if auditor.since else None,
        "problems": [asdict(problem) for problem in auditor.problems],
    }


def parse_head(text: str) -> Head:
    """A head from the command line. Raises ValueError."""
    try:
        return Head.parse(text)
    except ValueError:
        raise ValueError("wanted is what `rowlock history --head` printed: COUNT:LINK") from None


def _pages(connection: sqlite3.Connection) -> Iterator[Page]:
    after, last = 0, False
    while not last:
        page = read_page(connection, after)
        yield page
        last = page.last
        after = page.events[-1].event.position if page.events else after
