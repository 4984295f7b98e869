"""Builds programs in a process of its own: exporting and compiling may end the process that does it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.rngd.shape import ModelShape

MODULE: Final = "rowlock.bindings.rngd.build_child"
BUILT: Final = "built:"
"""Begins the line of the child that names what it built."""
LAST_WORDS: Final = 400
"""Characters of a failed child's output that are repeated."""


class Builder:
    """Runs the child that builds what is missing.

    Args:
        programs: directory in which it keeps what it builds.
        execution: ``reference`` or ``native``.
        command: that starts the child.

    """

    def __init__(self, programs: Path, execution: str, command: Sequence[str] = (sys.executable, "-m", MODULE)) -> None:
        self._command = [*command, str(programs), execution]

    def build(self, shape: ModelShape) -> int:
        """Build every variant that is missing; how many were.

        Raises:
            DeviceError: UNSUPPORTED, with the child's last words.

        """
        done = subprocess.run(
            self._command,
            input=shape.to_json(),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            # a vendor's package is loaded when it is wanted, and not with torch
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )
        if done.returncode != 0:
            end = f"ended with {done.returncode}"
            if done.returncode < 0:
                end = f"was ended by {signal.Signals(-done.returncode).name}"
            words = " ".join(done.stderr.split())[-LAST_WORDS:]
            raise DeviceError(DeviceFault.UNSUPPORTED, f"the process that builds programs {end}: {words}")
        return sum(line.startswith(BUILT) for line in done.stdout.splitlines())
