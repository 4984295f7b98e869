"""Looking for a device in a process of its own: a vendor's library may end the process that asks.

The child prints each finding as one line of JSON, at once: whatever happens to it, what it
found before is known, and so are its last words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from rowlock.bindings.children import end_of
from rowlock.bindings.finding import Finding
from rowlock.daemon.devices import parse_device
from rowlock.daemon.environments import DeviceRefusedError
from rowlock.daemon.probe_child import WITHOUT_HARDWARE

PROBE_S: Final = 120.0
"""Loading torch and a vendor's library takes seconds on a loaded machine."""
LAST_WORDS: Final = 300
"""Characters of a dead child's output that are repeated."""


def probe_device(name: str, without_hardware: bool) -> list[Finding]:
    """What there is of a device, from the driver up; nothing is loaded into this process.

    Raises:
        DeviceRefusedError: there is no such kind of device.

    """
    kind, _ = parse_device(name)
    if kind.environment is not None:
        try:
            kind.environment.check()
        except DeviceRefusedError as error:
            return [Finding("environment", False, str(error))]
    if kind.probe is None:
        return []
    options = [WITHOUT_HARDWARE] if without_hardware else []
    return list(run_probe([sys.executable, "-m", "rowlock.daemon.probe_child", name, *options]))


def refuse_absent(name: str, without_hardware: bool) -> None:
    """Raise DeviceRefusedError, with the reasons, unless everything that was found is good."""
    wrong = [f"{item.name}: {item.detail}" for item in probe_device(name, without_hardware) if not item.ok]
    if wrong:
        raise DeviceRefusedError(f"device {name} cannot be used: " + "; ".join(wrong))


def run_probe(command: Sequence[str], timeout_s: float = PROBE_S) -> Iterator[Finding]:
    """The findings of a child, and one more if it did not end well."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        out, err, problem = done.stdout, done.stderr, end_of(done.returncode) if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        out, err, problem = error.stdout or b"", error.stderr or b"", f"did not end within {timeout_s} s"
    last = ""
    for line in out.decode(errors="replace").splitlines():
        finding = _parse(line)
        if finding is not None:
            last = finding.name
            yield finding
    if problem:
        words = " ".join(err.decode(errors="replace").split())[-LAST_WORDS:]
        where = f" after looking at {last!r}" if last else ""
        yield Finding("probe", False, f"the process that looked {problem}{where}: {words or 'it said nothing'}")


def _parse(line: str) -> Finding | None:
    """A finding; None for what a vendor's library prints in between."""
    try:
        return Finding(**json.loads(line))
    except (ValueError, TypeError):
        return None
