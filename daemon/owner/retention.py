"""What is kept of the past, and what is let go: undo files by count and bytes, never the one that matters.

A rollback is offered to the identity before the current one, always: the undo that leads
there, and what repairs since then kept as evidence, stays whatever it weighs. Further back, undos are kept newest first
as long as count and bytes allow; what is let go is recorded, signed, before it is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rowlock.bindings.plan import UndoStore
from rowlock.journal.rows import GenerationRow

IN_FILES: Final = frozenset({UndoStore.DURABLE, UndoStore.EVIDENCE})
"""Undos that are files."""


@dataclass(frozen=True)
class Retention:
    """How much of the past is kept.

    Attributes:
        undo_generations: generations whose undo is kept, newest first; at least 1.
        undo_bytes: of all kept undo files together, except that the current generation's is always kept.

    """

    undo_generations: int = 8
    undo_bytes: int = 1024**3


@dataclass(frozen=True)
class Kept:
    """What retention leaves.

    Attributes:
        generations: whose identities a restart or an offered rollback may need, newest first.
        undos: those of them whose undo is kept.
        cut: generations whose undo is let go now.

    """

    generations: tuple[GenerationRow, ...]
    undos: tuple[GenerationRow, ...]
    cut: tuple[GenerationRow, ...]


def keep(
    rows: Sequence[GenerationRow],
    current: GenerationRow | None,
    cut_before: frozenset[str],
    size_of: Callable[[str], int],
    retention: Retention,
) -> Kept:
    """Judge every generation.

    Args:
        rows: newest first.
        current: the published one.
        cut_before: transitions whose undo was let go earlier.
        size_of: bytes of a transition's undo file.
        retention: the configuration.

    """
    generations: list[GenerationRow] = [current] if current else []
    undos: list[GenerationRow] = []
    nbytes, end, needed = 0, len(rows), True
    for index, row in enumerate(rows):
        generations.append(row)
        needed = needed and row.undo in IN_FILES
        if row.undo not in IN_FILES:
            continue
        nbytes += size_of(row.transition_id)
        full = len(undos) >= retention.undo_generations or nbytes > retention.undo_bytes
        if row.transition_id in cut_before or (full and not needed):
            end = index
            break
        undos.append(row)
        needed = needed and row.undo == UndoStore.EVIDENCE
    cut = [row for row in rows[end:] if row.undo in IN_FILES and row.transition_id not in cut_before]
    return Kept(tuple(generations), tuple(undos), tuple(cut))
