"""What remote prompts cost, measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

TIMELINES_MAX: Final = 1024
"""Timelines that are kept, the newest."""


@dataclass
class Timeline:
    """One remote prompt, in nanoseconds of CLOCK_MONOTONIC.

    Attributes:
        tokens: of the prompt.
        begun: when it was asked for.
        computed: when the source had computed the last layer; 0 before.
        done: when the source's last word was taken in; 0 before.
        admitted: when it became a sequence; 0 before.
        copies: (when it began, when it ended, bytes) of each copy.

    """

    tokens: int
    begun: int
    computed: int = 0
    done: int = 0
    admitted: int = 0
    copies: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def copies_before_computed(self) -> int:
        """Copies that ended before the source had computed its last layer."""
        return sum(stop <= self.computed for _, stop, _ in self.copies)
