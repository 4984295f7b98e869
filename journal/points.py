"""Named points around every durable effect and every device effect.

An owner is given one observer of them. In production it does nothing; tests stop the world
at a point, or look at what is already durable there. The boundaries themselves (files,
journal, device) say where they are, so an effect without its point cannot be had.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Final, Protocol


class Point(StrEnum):
    """One kind of effect."""

    # durable files
    MAKE_DIRECTORY = "make_directory"
    SYNC_DIRECTORY = "sync_directory"
    RESERVE_FILE = "reserve_file"
    WRITE_FILE = "write_file"
    SYNC_FILE = "sync_file"
    RENAME_FILE = "rename_file"
    REMOVE_FILE = "remove_file"
    # commits of the journal
    COMMIT_OWNER = "commit_owner"
    COMMIT_OPEN = "commit_open"
    COMMIT_STAGED = "commit_staged"
    COMMIT_INTENT = "commit_intent"
    COMMIT_PUBLISH = "commit_publish"
    COMMIT_END = "commit_end"
    COMMIT_AMEND = "commit_amend"
    COMMIT_QUARANTINE = "commit_quarantine"
    COMMIT_RELEASE = "commit_release"
    SETTLE = "settle"
    # calls into the device
    CREATE_RUNTIME = "create_runtime"
    WRITE_ROWS = "write_rows"
    FENCE = "fence"
    READ_ROWS = "read_rows"
    OPEN_SEQUENCE = "open_sequence"
    ADVANCE = "advance"
    WRITE_STATES = "write_states"
    ADMIT_PROMPT = "admit_prompt"
    CLOSE_RUNTIME = "close_runtime"
    # phases of a transition, which contain the others
    PHASE = "phase"


class Moment(StrEnum):
    """On which side of the effect. After one that raised there is no AFTER; but a phase always ends."""

    BEFORE = "before"
    AFTER = "after"


class Points(Protocol):
    """Told of every point, on the thread that is there. Must not use what it observes."""

    def at(self, point: Point, moment: Moment, subject: str) -> None:
        """Be told.

        Args:
            point: the effect.
            moment: about to happen, or done.
            subject: what it is done to: a file, a transition, an allocation, a phase.

        """
        ...


class Unobserved:
    """The observer of production: none."""

    def at(self, point: Point, moment: Moment, subject: str) -> None:
        """Do nothing."""


UNOBSERVED: Final[Points] = Unobserved()


@contextmanager
def around(points: Points, point: Point, subject: str) -> Iterator[None]:
    """The two points around an effect."""
    points.at(point, Moment.BEFORE, subject)
    yield
    points.at(point, Moment.AFTER, subject)
