"""A test option: the daemon kills itself at a named point, as a SIGKILL from outside would.

A daemon started with a kill file looks at it at every point. While the file does not
exist nothing happens. Its content is JSON::

    {"point": "write_rows", "moment": "before" | "after", "subject": "", "skip": 0}

The first ``skip`` points of that kind whose subject contains ``subject`` pass; at the next
the file is removed and the process gets SIGKILL: nothing more of it runs.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

from rowlock.journal.points import Moment, Point


@dataclass
class KillFile:
    """See :class:`rowlock.journal.points.Points`."""

    path: Path
    passed: int = 0

    def at(self, point: Point, moment: Moment, subject: str) -> None:
        """Die here, if the file says so."""
        try:
            wanted = json.loads(self.path.read_text())
        except FileNotFoundError:
            return
        if (wanted["point"], wanted["moment"]) != (point, moment) or wanted.get("subject", "") not in subject:
            return
        self.passed += 1
        if self.passed > wanted.get("skip", 0):
            self.path.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
