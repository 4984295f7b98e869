"""Faults injected into the CPU binding's storage, below ``DeviceMemory``.

A test option: a daemon started with a fault file looks at it on every storage
operation. While the file does not exist nothing happens. Its content is JSON::

    {"operation": "write" | "read" | "release", "effect": "flip" | "torn" | "error" | "rot",
     "skip": 0, "count": 1, "bit": 0}

The first ``skip`` operations of that kind pass; the next ``count`` are hit; then the
file is removed. Removing it earlier disarms the fault.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path


class Operation(StrEnum):
    """Storage operations that a fault can hit."""

    WRITE = "write"
    READ = "read"
    RELEASE = "release"


class Effect(StrEnum):
    """What a fault does: pass on one bit wrong, store only the first half, raise; ROT flips a stored bit, on a read."""

    FLIP = "flip"
    TORN = "torn"
    ERROR = "error"
    ROT = "rot"


@dataclass(frozen=True)
class Fault:
    """One armed fault; see the module's text."""

    operation: Operation
    effect: Effect
    skip: int = 0
    count: int = 1
    bit: int = 0


class FaultFile:
    """Faults armed from outside the process, by writing a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._armed: Fault | None = None

    def take(self, operation: Operation) -> Fault | None:
        """The fault that hits this operation now, if any."""
        if self._armed is None or not self.path.exists():
            self._armed = self._read()
        fault = self._armed
        if fault is None or fault.operation is not operation:
            return None
        if fault.skip > 0:
            self._armed = replace(fault, skip=fault.skip - 1)
            return None
        if fault.count <= 1:
            self.path.unlink(missing_ok=True)
            self._armed = None
        else:
            self._armed = replace(fault, count=fault.count - 1)
        return fault

    def _read(self) -> Fault | None:
        try:
            fields = json.loads(self.path.read_text())
        except FileNotFoundError:
            return None
        return Fault(**{**fields, "operation": Operation(fields["operation"]), "effect": Effect(fields["effect"])})
