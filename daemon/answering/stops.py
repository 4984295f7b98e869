"""Strings that end an answer, found across the borders of tokens."""

from __future__ import annotations

from typing import Final


class StopStrings:
    """Text up to the stop string that is complete first; how the text is cut into pieces changes nothing.

    What could be the beginning of a stop string is held back until it is known not to be.

    Attributes:
        found: a stop string was met; nothing more is given out.

    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops: Final = stops
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """The text that is now certain to belong to the answer."""
        assert not self.found, "the answer has ended"
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            return self._give(min(ends)[1])
        return self._give(len(self._held) - self._beginning())

    def finish(self) -> str:
        """What is held back, once no more text comes."""
        return "" if self.found else self._give(len(self._held))

    def _beginning(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        return given
