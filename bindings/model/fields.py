"""Typed reads from a parsed config. Free of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault

NUMBER_MAX: Final = 1e30


class Fields:
    """A config, or an object inside it; each read leaves its key marked as understood.

    Args:
        path: the file, for error messages.
        config: the object.
        inside: of which key it is the value; empty for the config itself.

    """

    def __init__(self, path: Path, config: dict[str, Any], inside: str = "") -> None:
        self.path = path
        self.config = config
        self.understood: set[str] = set()
        self.inside = inside

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self.error(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < NUMBER_MAX:
            raise self.error(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.error(key, value, "true or false")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where it is absent or null."""
        self.understood.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def inner(self, key: str) -> Fields:
        """The object that is the value of a key; empty where there is none."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, value, "an object")
        return Fields(self.path, value, f"{self.inside}{key}.")

    def error(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(
            CheckpointFault.UNSUPPORTED,
            self.path,
            f"{self.inside}{key} is {str(value)[:80]!r}; this decoder needs {wanted}",
        )

    def refuse_unknown(self, harmless: frozenset[str] = frozenset()) -> None:
        """Refuse what nobody has read. Raises CheckpointError."""
        for key, value in self.config.items():
            if key not in self.understood and key not in harmless and value not in (None, False):
                raise self.error(key, value, "this key to be absent: it is not known to be harmless")
