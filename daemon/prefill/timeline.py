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
        spans: when the last copy of each span ended.

    """

    tokens: int
    begun: int
    computed: int = 0
    done: int = 0
    admitted: int = 0
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    spans: list[int] = field(default_factory=list)

    @property
    def spans_before_computed(self) -> int:
        """Spans that were in their pages before the source had computed its last layer."""
        return sum(moment <= self.computed for moment in self.spans)

    @property
    def exposed_ns(self) -> int:
        """How much of the copying came after the source had computed its last layer."""
        return sum(stop - max(begun, self.computed) for begun, stop, _ in self.copies if stop > self.computed)

    def figures(self) -> dict[str, int]:
        """For the log."""
        return {
            "prompt_tokens": self.tokens,
            "begun_ns": self.begun,
            "computed_ns": self.computed,
            "done_ns": self.done,
            "copied_ns": self.spans[-1] if self.spans else 0,
            "admitted_ns": self.admitted,
            "spans_before_computed": self.spans_before_computed,
            "copies": len(self.copies),
            "copy_ns": sum(stop - begun for begun, stop, _ in self.copies),
            "exposed_copy_ns": self.exposed_ns,
        }
