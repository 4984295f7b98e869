"""Orders to a daemon started with ``--test-kill-file``: where it dies, or where one of its threads waits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A named point of the daemon, on one side of its effect.

    Attributes:
        subject: a part of what the effect is done to; empty is anything.
        skip: how many such points pass.

    """

    point: str
    moment: str
    subject: str = ""
    skip: int = 0


@dataclass(frozen=True)
class KillOrder:
    """The file that a daemon looks at."""

    file: Path

    @property
    def arguments(self) -> list[str]:
        """For the daemon."""
        return ["--test-kill-file", str(self.file)]

    @property
    def met(self) -> bool:
        """Whether the daemon came by the place."""
        return self._met.exists()

    @property
    def _met(self) -> Path:
        return self.file.with_name(self.file.name + ".met")

    def die_at(self, place: Place) -> None:
        """Have the process kill itself there."""
        self._write(place, "kill")

    @contextmanager
    def pause_at(self, place: Place) -> Iterator[None]:
        """Have a thread wait there. On entry: armed. On exit: it has been let go, to the next order if there is one."""
        self._write(place, "wait")
        yield
        if not self.met:
            self.file.unlink(missing_ok=True)
        self._met.unlink(missing_ok=True)

    def wait(self) -> None:
        """Until a thread waits there."""
        deadline = time.monotonic() + 60
        while not self.met:
            assert time.monotonic() < deadline, "nothing came by the point"
            time.sleep(0.01)

    def _write(self, place: Place, act: str) -> None:
        self.file.write_text(json.dumps({**vars(place), "act": act}))
