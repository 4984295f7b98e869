"""Faults injected into a binding's storage, below ``DeviceMemory``.

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

import numpy as np
import torch

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.memory import Storage


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


def with_faults(storage: Storage, faults: FaultFile | None) -> Storage:
    """The storage itself, or behind the seam where there is a fault file."""
    return FaultyStorage(storage, faults) if faults else storage


class FaultyStorage:
    """A storage that a fault file can make lie or fail. It stores bytes like the real one."""

    def __init__(self, inner: Storage, faults: FaultFile) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def tensor(self) -> torch.Tensor:
        return self._inner.tensor

    @property
    def address(self) -> int:
        return self._inner.address

    def write(self, offset: int, data: Bytes) -> None:
        fault = self._faults.take(Operation.WRITE)
        if fault is None:
            self._inner.write(offset, data)
        elif fault.effect is Effect.FLIP:
            self._inner.write(offset, _flipped(data, fault.bit))
        else:
            self._inner.write(offset, data[: data.nbytes // 2])
            if fault.effect is Effect.ERROR:
                raise DeviceError(DeviceFault.LOST, "injected: write failed")

    def read(self, offset: int, out: Bytes) -> None:
        fault = self._take_read()
        self._inner.read(offset, out)
        if fault is not None:
            out[...] = self._wrong(fault, offset, out)

    def view(self, offset: int, nbytes: int) -> Bytes | None:
        found = self._inner.view(offset, nbytes)
        if found is None:
            return None
        fault = self._take_read()
        return found if fault is None else self._wrong(fault, offset, found)

    def _take_read(self) -> Fault | None:
        fault = self._faults.take(Operation.READ)
        if fault is not None and fault.effect is Effect.ERROR:
            raise DeviceError(DeviceFault.LOST, "injected: read failed")
        return fault

    def _wrong(self, fault: Fault, offset: int, data: Bytes) -> Bytes:
        wrong = _flipped(data, fault.bit)
        if fault.effect is Effect.ROT:
            self._inner.write(offset, wrong)
        return wrong

    def release(self) -> None:
        if self._faults.take(Operation.RELEASE) is not None:
            raise DeviceError(DeviceFault.LOST, "injected: release failed")
        self._inner.release()


def _flipped(data: Bytes, bit: int) -> Bytes:
    wrong = data.copy()
    wrong[bit // 8 % wrong.nbytes] ^= np.uint8(1 << bit % 8)
    return wrong
