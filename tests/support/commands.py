"""The real command line, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


def rowlock(*arguments: object, endpoint: str = "", timeout_s: float = 120, **environment: str) -> Finished:
    """Run ``rowlock`` to its end."""
    env = {**os.environ, **environment}
    if endpoint:
        env["ROWLOCK_ENDPOINT"] = endpoint
    done = subprocess.run(
        [sys.executable, "-m", "rowlock.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=env,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr)
