"""Builds programs in a process of its own: exporting and compiling may end the process that does it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rowlock.bindings.children import end_of
from rowlock.bindings.device import DeviceError, DeviceFault, never
from rowlock.bindings.rngd.shape import ProgramSet

MODULE: Final = "rowlock.bindings.rngd.build_child"
BUILT: Final = "built:"
"""Begins the line of the child that names what it built."""
LOOK_S: Final = 0.2
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

    def build(self, wanted: ProgramSet, given_up: Callable[[], bool] = never) -> int:
        """Build every program that is missing; how many were.

        Args:
            wanted: of one model.
            given_up: looked at meanwhile; the child is then ended.

        Raises:
            DeviceError: UNSUPPORTED, with the child's last words; or it was given up.

        """
        with subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            # a vendor's package is loaded when it is wanted, and not with torch
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        ) as child:
            out, err = _talk(child, wanted.to_json(), given_up)
        if child.returncode != 0:
            words = " ".join(err.split())[-LAST_WORDS:]
            message = f"the process that builds programs {end_of(child.returncode)}: {words}"
            raise DeviceError(DeviceFault.UNSUPPORTED, message)
        return sum(line.startswith(BUILT) for line in out.splitlines())


def _talk(child: subprocess.Popen[str], asked: str | None, given_up: Callable[[], bool]) -> tuple[str, str]:
    """What a child has printed when it has ended, to stdout and to stderr. Raises DeviceError: it was given up."""
    while True:
        try:
            return child.communicate(asked, timeout=LOOK_S)
        except subprocess.TimeoutExpired:
            asked = None  # it was sent
        if given_up():
            child.kill()
            raise DeviceError(DeviceFault.UNSUPPORTED, "the building of programs was given up")
