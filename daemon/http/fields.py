"""Fields of a request, each taken once; what nobody took is refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from rowlock.daemon.http.problems import HttpError, invalid


class Fields:
    """A JSON object that is read field by field. ``null`` is the same as absent.

    Args:
        body: the object.
        where: put before each field's name in messages.

    """

    def __init__(self, body: Mapping[str, Any], where: str = "") -> None:
        self._left = dict(body)
        self._where = where
        self._known: set[str] = set()

    def take(self, name: str) -> Any:
        """A field's value, or None."""
        self._known.add(name)
        return self._left.pop(name, None)

    def text(self, name: str, default: str | None = None) -> str:
        value = self.take(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise self.invalid(name, "is missing" if value is None else "is not a text")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise self.invalid(name, "is not true or false")
        return bool(value)

    def number(self, name: str, default: float) -> float:
        value = self.take(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.invalid(name, "is not a number")
        try:
            return float(value)
        except OverflowError:
            raise self.invalid(name, "is too large") from None

    def count(self, name: str, least: int, most: int) -> int | None:
        """A whole number within bounds, or None."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.invalid(name, f"is not a whole number from {least} to {most}")
        return value

    def only(self, name: str, *harmless: Any) -> None:
        """Refuse a field that is not supported, unless its value is one that asks for nothing."""
        value = self.take(name)
        if value is not None and not any(type(value) is type(item) and value == item for item in harmless):
            raise self.invalid(name, "is not supported", "unsupported_parameter")

    def ignore(self, *names: str) -> None:
        """Accept fields that are notes of the caller's and change no answer."""
        for name in names:
            self.take(name)

    def end(self) -> None:
        """Refuse the first field that was not taken."""
        for name in self._left:
            close = difflib.get_close_matches(name, self._known, n=1, cutoff=0.6)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise self.invalid(name[:80], f"is not a known field{meant}", "unknown_parameter")

    def invalid(self, name: str, problem: str, code: str = "invalid_value") -> HttpError:
        return invalid(self._where + name, problem, code)
