"""The bugs of `bugs.toml`, and how one is planted in a copy of the sources."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Bug:
    """One bug.

    Attributes:
        name: what it does.
        file: relative to the repository.
        text: replaced; occurs once.
        instead: what it is replaced by.

    """

    name: str
    file: str
    text: str
    instead: str

    def plant(self, root: Path) -> None:
        """Change a copy of the sources."""
        path = root / self.file
        source = path.read_text()
        assert source.count(self.text) == 1, f"{self.name}: occurs {source.count(self.text)} times in {self.file}"
        path.write_text(source.replace(self.text, self.instead))


def bugs() -> list[Bug]:
    """Those of `bugs.toml`."""
    return [Bug(**item) for item in tomllib.loads(Path(__file__).with_name("bugs.toml").read_text())["bug"]]
