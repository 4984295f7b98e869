"""A deadline for each call into the device library.

A call that does not come back cannot be ended. When its deadline passes, the owner is
declared quarantined, without touching the device: whoever waits is told, new work is
refused, reads and history still answer. Should the call come back after all, the owner
thread ends where it stands.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.device import (
    Allocation,
    Binding,
    CacheUse,
    Counters,
    DeviceFacts,
    DeviceMemory,
    Runtime,
    Sampling,
    Sequence,
    Step,
    Variant,
    never,
)
from rowlock.bindings.importing import PromptImport, PromptImporter, States
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout, ParentInfo
from rowlock.journal.points import Point, Points, around

LOOK_EVERY_S: Final = 0.5


class AbandonedError(BaseException):
    """The owner was declared quarantined while this thread was in a device call."""


class Watchdog:
    """Watches one thread's device calls.

    The watched thread only notes what it is doing; this one looks from time to time.

    Args:
        timeout_s: for each call.
        expired: told, on the watchdog's thread, what did not come back.

    """

    def __init__(self, timeout_s: float, expired: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._expired = expired
        self._lock = threading.Lock()
        self._call: tuple[str, float] | None = None
        self._abandoned = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rowlock-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def expired(self) -> bool:
        """Whether a call has been given up: true before anybody is told."""
        return self._abandoned

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Around one device call. Raises AbandonedError when it came back too late."""
        self._note((name, time.monotonic()))
        try:
            yield
        finally:
            self._note(None)

    def _note(self, call: tuple[str, float] | None) -> None:
        with self._lock:
            if self._abandoned:
                raise AbandonedError
            self._call = call

    def _watch(self) -> None:
        while not self._closed.wait(min(self._timeout_s / 4, LOOK_EVERY_S)):
            with self._lock:
                call = self._call
                late = call is not None and time.monotonic() - call[1] > self._timeout_s
                self._abandoned = bool(late)
            if late:
                assert call is not None
                self._expired(f"the device call {call[0]} did not come back within {self._timeout_s} s")
                return


@dataclass(frozen=True)
class _Boundary:
    """What goes on around a device call: its points, and within them its deadline."""

    watchdog: Watchdog
    points: Points

    @contextmanager
    def call(self, point: Point, subject: str) -> Iterator[None]:
        with around(self.points, point, subject), self.watchdog.call(point):
            yield


class WatchedBinding:
    """A binding whose every call has a deadline, and lies between its points."""

    def __init__(self, inner: Binding, watchdog: Watchdog, points: Points) -> None:
        self._inner = inner
        self._watchdog = watchdog
        self._boundary = _Boundary(watchdog, points)
        self.memory: DeviceMemory = _WatchedMemory(inner.memory, watchdog, self._boundary)

    @property
    def facts(self) -> DeviceFacts:
        return self._inner.facts

    @property
    def counters(self) -> Counters:
        return self._inner.counters

    def place(self, layout: Layout) -> Layout:
        return self._inner.place(layout)

    def prepare(
        self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...], given_up: Callable[[], bool] = never
    ) -> None:
        """Not watched: it does not touch the device, and may take its time."""
        self._inner.prepare(config, layout, variants, given_up)

    def create_runtime(self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...] = ()) -> Runtime:
        with self._boundary.call(Point.CREATE_RUNTIME, self.facts.device):
            return _WatchedRuntime(self._inner.create_runtime(config, layout, variants), self._boundary)

    def close(self) -> None:
        with self._watchdog.call("close"):
            self._inner.close()


class _WatchedMemory:
    def __init__(self, inner: DeviceMemory, watchdog: Watchdog, boundary: _Boundary) -> None:
        self._inner = inner
        self._watchdog = watchdog
        self._boundary = boundary

    def allocate(self, parent: ParentInfo) -> Allocation:
        with self._watchdog.call("allocate"):
            return self._inner.allocate(parent)

    def write_rows(self, allocation: Allocation, first_row: int, data: Bytes) -> None:
        with self._boundary.call(Point.WRITE_ROWS, allocation.parent.name):
            self._inner.write_rows(allocation, first_row, data)

    def read_rows(self, allocation: Allocation, first_row: int, out: Bytes) -> None:
        with self._boundary.call(Point.READ_ROWS, allocation.parent.name):
            self._inner.read_rows(allocation, first_row, out)

    def view_rows(self, allocation: Allocation, first_row: int, rows: int) -> Bytes | None:
        with self._boundary.call(Point.READ_ROWS, allocation.parent.name):
            return self._inner.view_rows(allocation, first_row, rows)

    def fence(self) -> None:
        with self._boundary.call(Point.FENCE, "device"):
            self._inner.fence()

    def release(self, allocation: Allocation) -> None:
        with self._watchdog.call("release"):
            self._inner.release(allocation)

    def close(self) -> None:
        with self._watchdog.call("close"):
            self._inner.close()

    def probe(self) -> None:
        with self._watchdog.call("probe"):
            self._inner.probe()


class _WatchedRuntime:
    def __init__(self, inner: Runtime, boundary: _Boundary) -> None:
        self._inner = inner
        self._boundary = boundary

    @property
    def allocations(self) -> Mapping[str, Allocation]:
        return self._inner.allocations

    @property
    def programs(self) -> Mapping[str, str]:
        return self._inner.programs

    def add_variant(self, variant: Variant) -> None:
        with self._boundary.watchdog.call("add_variant"):
            self._inner.add_variant(variant)

    def open_sequence(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> Sequence:
        with self._boundary.call(Point.OPEN_SEQUENCE, f"{len(prompt)} tokens"):
            return self._inner.open_sequence(prompt, sampling, capacity)

    @property
    def cache(self) -> CacheUse:
        return self._inner.cache

    @property
    def importer(self) -> PromptImporter | None:
        inner = self._inner.importer
        return _WatchedImporter(inner, self._boundary) if inner is not None else None

    def has_room(self, *tokens: int) -> bool:
        return self._inner.has_room(*tokens)

    def forget(self) -> None:
        self._inner.forget()

    def advance(self, sequences: list[Sequence]) -> list[Step]:
        with self._boundary.call(Point.ADVANCE, f"{len(sequences)} sequences"):
            return self._inner.advance(sequences)

    def close(self) -> None:
        with self._boundary.call(Point.CLOSE_RUNTIME, "runtime"):
            self._inner.close()


class _WatchedImporter:
    def __init__(self, inner: PromptImporter, boundary: _Boundary) -> None:
        self._inner = inner
        self._boundary = boundary

    def open(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> PromptImport:
        with self._boundary.call(Point.OPEN_SEQUENCE, f"{len(prompt)} tokens"):
            return _WatchedImport(self._inner.open(prompt, sampling, capacity), self._boundary)

    def fence(self) -> None:
        with self._boundary.call(Point.FENCE, "device"):
            self._inner.fence()


class _WatchedImport:
    def __init__(self, inner: PromptImport, boundary: _Boundary) -> None:
        self._boundary = boundary
        self._inner = inner
        self.wanted = inner.wanted
        self.release = inner.release
        self.quarantine = inner.quarantine

    def write(self, layer: int, first: int, states: States) -> None:
        with self._boundary.call(Point.WRITE_STATES, f"layer {layer}"):
            self._inner.write(layer, first, states)

    def admit(self, logits: States) -> tuple[Sequence, Step]:
        with self._boundary.call(Point.ADMIT_PROMPT, "logits"):
            return self._inner.admit(logits)
