"""A simulated device: it computes nothing, and stores every byte.

Writes are started by ``write_rows`` and land at the next fence, so a fence that is left out can be
seen. Memory that is freed keeps its bytes, and is given out again as it is. It also notes what a real
device would not forgive: a write while a step of a program may still run.

What a program answers depends on every resident byte, and on its own K/V: no answer can be
right on wrong weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from blake3 import blake3

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.device import Allocation, Counters, DeviceFacts, Sampling, Step, Variant, never
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout, ParentInfo
from rowlock.bindings.unpaged import Unpaged

KV_BYTES = 4096
PAGE_BYTES = 32
FRESH = 0xA5

Hook = Callable[["Device", str, str], str]
"""Asked before each operation: (device, operation, subject) -> what shall go wrong, or empty. May raise."""


@dataclass
class Write:
    slot: str
    offset: int
    data: Bytes


@dataclass
class Device:
    """The hardware. One process at a time uses it; it may outlive them.

    Attributes:
        slots: bytes by parent name, live or freed.
        live: names of the slots that are allocated, with the allocation's id.
        started: writes that have not landed.
        stepping: a step of a program may still run.
        hazards: what a real device would not forgive.
        kept: the K/V pool.
        version: grows with every change of what a later process may find.

    """

    slots: dict[str, Bytes] = field(default_factory=dict)
    live: dict[str, str] = field(default_factory=dict)
    started: list[Write] = field(default_factory=list)
    kept: Bytes = field(default_factory=lambda: np.zeros(KV_BYTES, np.uint8))
    stepping: bool = False
    hazards: list[str] = field(default_factory=list)
    allocations: int = 0
    sequences: int = 0
    version: int = 0
    stale: dict[str, Bytes] = field(default_factory=dict)

    def copy(self) -> Device:
        return Device(
            {name: data.copy() for name, data in self.slots.items()}, dict(self.live), list(self.started),
            self.kept.copy(), self.stepping, list(self.hazards), self.allocations,
        )  # fmt: skip

    def after_process(self, *, survives: bool, seed: int) -> Device:
        """What the next process finds: nothing is allocated; the bytes are still there, or noise.

        Of the writes that had not landed some have, in whole or in part.
        """
        left = Device(allocations=self.allocations)
        for name, data in self.slots.items():
            left.slots[name] = data.copy() if survives else noise(data.nbytes).copy()
        if survives:
            torn = random.Random(seed)
            for write in self.started:
                size = torn.choice((0, write.data.nbytes // 2, write.data.nbytes))
                left.slots[write.slot][write.offset : write.offset + size] = write.data[:size]
        return left

    def key(self) -> bytes:
        digest = blake3()
        for name, data in sorted(self.slots.items()):
            digest.update(name.encode())
            digest.update(data.data)
        return digest.digest()

    def resident(self) -> dict[str, bytes]:
        """The bytes of all that is allocated, as a program would read them."""
        return {name: self.slots[name].tobytes() for name in self.live}

    def digest(self) -> str:
        digest = blake3()
        for name in sorted(self.live):
            digest.update(self.slots[name].data)
        return digest.hexdigest()

    def land(self) -> None:
        self.version += bool(self.started)
        for write in self.started:
            span = slice(write.offset, write.offset + write.data.nbytes)
            self.stale[write.slot] = self.slots[write.slot].copy()
            self.slots[write.slot][span] = write.data
        self.started = []


@cache
def noise(nbytes: int) -> Bytes:
    """What memory holds that nobody has written."""
    return np.random.default_rng(7).integers(0, 256, nbytes, np.uint8)


class SimBinding:
    """One process's use of a device; see :class:`rowlock.bindings.device.Binding`.

    Args:
        device: the hardware.
        hook: may make an operation fail or lie.

    """

    def __init__(self, device: Device, hook: Hook) -> None:
        self.device = device
        self.counters = Counters()
        self.memory = SimMemory(device, self.counters, hook)
        self.facts = DeviceFacts(
            device="sim",
            logical="sim",
            binding="sim",
            versions={},
            readback="storage",
            execution="simulated",
            test_options=(),
        )
        self._hook = hook

    def place(self, layout: Layout) -> Layout:
        return layout

    def prepare(
        self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...], given_up: Callable[[], bool] = never
    ) -> None:
        """It has no programs."""

    def create_runtime(self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...] = ()) -> SimRuntime:
        self._hook(self.device, "create_runtime", "")
        allocations: dict[str, Allocation] = {}
        try:
            for name, parent in layout.parents.items():
                allocations[name] = self.memory.allocate(parent)
        except BaseException:
            for allocation in allocations.values():
                self.memory.release(allocation)
            raise
        self.counters.program_loads += 1
        return SimRuntime(self.memory, allocations, self._hook)

    def close(self) -> None:
        self.memory.close()


class SimMemory:
    def __init__(self, device: Device, counters: Counters, hook: Hook) -> None:
        self.device = device
        self._counters = counters
        self._hook = hook

    def allocate(self, parent: ParentInfo) -> Allocation:
        device = self.device
        self._hook(device, "allocate", parent.name)
        assert parent.name not in device.live, f"{parent.name} is allocated twice: the old runtime was not closed"
        if device.slots.get(parent.name, np.empty(0, np.uint8)).nbytes != parent.nbytes:
            device.slots[parent.name] = np.full(parent.nbytes, FRESH, np.uint8)
        device.allocations += 1
        device.version += 1
        allocation = Allocation(f"sim-{device.allocations}", parent)
        device.live[parent.name] = allocation.id
        self._counters.allocations += 1
        return allocation

    def write_rows(self, allocation: Allocation, first_row: int, data: Bytes) -> None:
        self._check(allocation, first_row, data)
        device, offset = self.device, first_row * allocation.parent.row_bytes
        if device.stepping:
            device.hazards.append(f"write to {allocation.parent.name} while a step may run")
        effect = self._hook(device, "write_rows", allocation.parent.name)
        self._counters.bytes_written += data.nbytes
        write = Write(allocation.parent.name, offset, data.copy())
        device.version += 1
        device.started += _spoiled(device, write, effect, allocation.parent.row_bytes)

    def read_rows(self, allocation: Allocation, first_row: int, out: Bytes) -> None:
        self._check(allocation, first_row, out)
        effect = self._hook(self.device, "read_rows", allocation.parent.name)
        self._counters.bytes_read_back += out.nbytes
        offset = first_row * allocation.parent.row_bytes
        name = allocation.parent.name
        source = self.device.stale.get(name, self.device.slots[name]) if effect == "stale" else self.device.slots[name]
        np.copyto(out, source[offset : offset + out.nbytes])
        if effect == "flip":
            out[out.nbytes // 2] ^= 1
        elif effect == "torn":
            out[out.nbytes // 2 :] = FRESH

    def view_rows(self, allocation: Allocation, first_row: int, rows: int) -> None:
        """It is not host memory."""

    def fence(self) -> None:
        self._hook(self.device, "fence", "")
        self.device.land()
        self.device.stepping = False

    def release(self, allocation: Allocation) -> None:
        assert self.device.live.get(allocation.parent.name) == allocation.id, f"{allocation.id} is not live"
        self._hook(self.device, "release", allocation.parent.name)
        del self.device.live[allocation.parent.name]

    def close(self) -> None:
        self.device.live.clear()

    def probe(self) -> None:
        """It always answers."""

    def _check(self, allocation: Allocation, first_row: int, data: Bytes) -> None:
        parent = allocation.parent
        assert self.device.live.get(parent.name) == allocation.id, f"{allocation.id} is not live"
        rows, rest = divmod(data.nbytes, parent.row_bytes)
        assert rest == 0, "not whole rows"
        assert 0 <= first_row <= parent.rows - rows, "rows out of bounds"


def _spoiled(device: Device, write: Write, effect: str, row_bytes: int) -> list[Write]:
    """What really lands of a write."""
    data = write.data
    if effect == "flip":
        data[data.nbytes // 2] ^= 1
    if effect == "torn":
        return [Write(write.slot, write.offset, data[: data.nbytes // 2])]
    if effect == "lost":
        return []
    if effect == "neighbour":
        return [write, *_stray(device, write.slot, write.offset + data.nbytes, row_bytes)]
    if effect == "next_group":
        return [write, *_stray(device, write.slot, write.offset + 64 * 1024, row_bytes)]
    if effect == "other_parent":
        other = next(name for name in sorted(device.live) if name != write.slot)
        return [write, *_stray(device, other, 0, row_bytes)]
    if effect == "kv":
        device.kept[:] ^= 0xFF
    return [write]


def _stray(device: Device, slot: str, offset: int, nbytes: int) -> list[Write]:
    """A row that is written where it does not belong; wraps around at the end."""
    size = device.slots[slot].nbytes
    start = offset % size
    length = min(nbytes, size - start)
    return [Write(slot, start, np.full(length, 0x3C, np.uint8))]


class SimRuntime(Unpaged):
    """See :class:`rowlock.bindings.device.Runtime`."""

    def __init__(self, memory: SimMemory, allocations: Mapping[str, Allocation], hook: Hook) -> None:
        self.allocations = allocations
        self.programs: Mapping[str, str] = {}
        self.memory = memory
        self._hook = hook
        self._live = dict(allocations)

    def add_variant(self, variant: Variant) -> None:
        """It has no programs."""

    def open_sequence(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> SimSequence:
        assert self._live, "the runtime is closed"
        self._hook(self.memory.device, "open_sequence", "")
        return SimSequence(self.memory.device, prompt)

    def advance(self, sequences: list[Any]) -> list[Step]:
        self._hook(self.memory.device, "advance", "")
        self.memory.device.stepping = True
        weights = self.memory.device.digest()
        return [sequence.advance(weights) for sequence in sequences]

    def close(self) -> None:
        self._hook(self.memory.device, "close_runtime", "")
        for name in list(self._live):
            self.memory.release(self._live[name])
            del self._live[name]


class SimSequence:
    """Tokens from a digest of the weights, the prompt and the K/V so far."""

    def __init__(self, device: Device, prompt: tuple[int, ...]) -> None:
        start = device.sequences * PAGE_BYTES % KV_BYTES
        device.sequences += 1
        self._page = device.kept[start : start + PAGE_BYTES]
        self._page[:] = _bytes(blake3(bytes(str(prompt), "ascii")).digest())

    def advance(self, weights: str) -> int:
        token, keys_values = step(weights, self._page.tobytes())
        self._page[:] = _bytes(keys_values)
        return token

    def close(self) -> None:
        """Nothing is held."""


def _bytes(data: bytes) -> Bytes:
    return np.frombuffer(data, np.uint8)


def step(weights: str, keys_values: bytes) -> tuple[int, bytes]:
    """One token, and the K/V after it."""
    state = blake3(weights.encode() + keys_values).digest()
    return state[0] % 200, state


def reference(weights: str, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """What an answer on these weights must be."""
    found, keys_values = [], blake3(bytes(str(prompt), "ascii")).digest()
    for _ in range(tokens):
        token, keys_values = step(weights, keys_values)
        found.append(token)
    return found
