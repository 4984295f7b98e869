"""A test option: the daemon kills itself at a named point, as a SIGKILL from outside would, or waits there.

A daemon started with a kill file looks at it at every point. While the file does not
exist nothing happens. Its content is JSON::

    {"point": "write_rows", "moment": "before" | "after", "subject": "", "skip": 0, "act": "kill" | "wait"}

The first ``skip`` points of that kind whose subject contains ``subject`` pass. At the next the file
is renamed, with ``.met`` behind its name; then the process gets SIGKILL, and nothing more of it runs; or the thread
that is there waits until that file is gone.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rowlock.journal.points import Moment, Point

LOOK_EVERY_S: Final = 0.01


@dataclass
class KillFile:
    """See :class:`rowlock.journal.points.Points`."""

    path: Path
    passed: int = 0

    def at(self, point: Point, moment: Moment, subject: str) -> None:
        """Die or wait here, if the file says so."""
        try:
            wanted = json.loads(self.path.read_text())
        except FileNotFoundError:
            return
        if (wanted["point"], wanted["moment"]) != (point, moment) or wanted.get("subject", "") not in subject:
            return
        self.passed += 1
        if self.passed > wanted.get("skip", 0):
            self.passed = 0
            met = self.path.with_name(self.path.name + ".met")
            self.path.rename(met)
            if wanted.get("act", "kill") == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            while met.exists():
                time.sleep(LOOK_EVERY_S)
