"""One remote prompt on its way into the owner's pages."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np

from rowlock.bindings.device import DeviceError, Sequence, Step
from rowlock.bindings.importing import PromptImport, PromptImporter
from rowlock.daemon.owner.requests import Lease
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.prefill.coverage import Coverage, SpanRefusedError
from rowlock.daemon.prefill.life import Arrival
from rowlock.daemon.prefill.protocol.frames import Done, Failed, Memory, Refusal, Span
from rowlock.daemon.prefill.protocol.geometry import DTYPE_CODES, DTYPES, Geometry, RequestLayout
from rowlock.daemon.prefill.protocol.memory import OwnerMemory
from rowlock.daemon.prefill.timeline import Timeline
from rowlock.v1.errors import OwnerError, Reason

COPY_BYTES: Final = 4 * 1024 * 1024
"""Bytes of one copy, at most. Each costs a fifth of a ms, so small layers of a span are copied together."""


class ImportedPrompt:
    """See :class:`rowlock.daemon.owner.prefilling.RemotePrompt`.

    Args:
        number: of the request, on the link.
        geometry: of the resident model.
        prompt: its tokens.
        room: where its K/V goes.
        importer: of the runtime.
        lease: what it is computed under.
        ended: told when it is over, admitted or not.
        now_ns: CLOCK_MONOTONIC.

    Attributes:
        error: why it will not come.
        timeline: when what happened.
        quarantined: its room was given up.

    """

    def __init__(
        self, number: int, geometry: Geometry, prompt: tuple[int, ...], room: PromptImport, importer: PromptImporter,
        lease: Lease, ended: Callable[[ImportedPrompt], None], now_ns: Callable[[], int],
    ) -> None:  # fmt: skip
        self.number = number
        self.lease = lease
        self.prompt = prompt
        firsts = tuple(room.wanted(geometry.group_of.index(group)).start for group in range(len(geometry.groups)))
        self.layout = RequestLayout(geometry, len(prompt), firsts)
        self.error: OwnerError | None = None
        self.timeline = Timeline(len(prompt), now_ns())
        self.quarantined = False
        self.open = True
        self._room = room
        self._importer = importer
        self._ended = ended
        self._now_ns = now_ns
        self._coverage = Coverage(self.layout, lease.generation)
        self._memory: OwnerMemory | None = None
        self._copies: deque[tuple[range, int, int, bool]] = deque()
        self._done = False

    @property
    def spans(self) -> int:
        return self._coverage.spans

    @property
    def complete(self) -> bool:
        return self._done and not self._copies and self.error is None

    @property
    def ended_on_wire(self) -> bool:
        """Whether nothing that still comes for it counts."""
        return self._done or self.error is not None

    @property
    def copying(self) -> bool:
        """Whether ``copy`` has something to do."""
        return bool(self._copies) and self.error is None

    def take(self, arrival: Arrival) -> None:
        """Something came for it. What cannot be right fails it, and nothing of that is written."""
        frame = arrival.frame
        try:
            if isinstance(frame, Memory):
                self._take_memory(frame, arrival)
            elif isinstance(frame, Span):
                self._take_span(frame)
            elif isinstance(frame, Done):
                self._take_done(frame)
            elif isinstance(frame, Failed):
                self._take_failed(frame)
        except SpanRefusedError as error:
            arrival.let_go()
            self.fail(OwnerError(Reason.SOURCE_FAILED, f"the source sent what was not asked for: {error}"))

    def copy(self, until_ns: float = math.inf) -> None:
        """Copy announced K/V into its pages; no copy begins after ``until_ns``."""
        while self.copying and self._now_ns() < until_ns:
            layers, first, stop, last = self._copies.popleft()
            begun = self._now_ns()
            try:
                self._room.write(layers.start, first, self._states(layers, first, stop))
            except (DeviceError, ValueError) as error:
                self.fail(OwnerError(Reason.DEVICE_FAILED, f"a copy of K/V failed: {error}"))
                break
            nbytes = len(layers) * (stop - first) * self.layout.geometry.token_bytes
            ended = self._now_ns()
            self.timeline.copies.append((begun, ended, nbytes))
            if last:
                self.timeline.spans.append(ended)

    def admit(self, resident: Resident) -> tuple[Sequence, Step]:
        """See :meth:`rowlock.daemon.owner.prefilling.RemotePrompt.admit`."""
        assert self.complete, "K/V is missing"
        missing = self._coverage.missing()
        assert not missing, missing
        try:
            return self._admit(resident)
        except OwnerError as error:
            self.fail(error)
            raise
        except DeviceError as error:
            self.fail(OwnerError(Reason.DEVICE_FAILED, str(error)))
            raise

    def fail(self, error: OwnerError) -> None:
        """It will not come: the first reason counts."""
        self.error = self.error or error

    def end(self, *, abandon: bool = False) -> None:
        """See :meth:`rowlock.daemon.owner.prefilling.RemotePrompt.end`."""
        if not self.open:
            return
        if abandon or not self._fenced():
            self._room.quarantine()
            self.quarantined = True
        else:
            self._room.release()
        self._close()

    def _admit(self, resident: Resident) -> tuple[Sequence, Step]:
        if (self.lease.generation, self.lease.identity) != (resident.generation, resident.model.identity):
            raise OwnerError(
                Reason.SOURCE_FAILED,
                f"computed for generation {self.lease.generation}, resident is {resident.generation}",
            )
        self._importer.fence()
        sequence, step = self._room.admit(self._logits())
        self.timeline.admitted = self._now_ns()
        self._close()
        return sequence, step

    def _fenced(self) -> bool:
        """Whether every copy is proved to have ended."""
        try:
            self._importer.fence()
        except DeviceError:
            return False
        return True

    def _close(self) -> None:
        self.open = False
        self._copies.clear()
        if self._memory is not None:
            self._memory.close()
        self._ended(self)

    def _take_memory(self, frame: Memory, arrival: Arrival) -> None:
        if frame.generation != self.lease.generation:
            raise SpanRefusedError(f"memory.generation is {frame.generation}, wanted {self.lease.generation}")
        if arrival.memory is None:
            raise SpanRefusedError(arrival.reason)
        if self._memory is not None:
            raise SpanRefusedError("memory came twice")
        if frame.nbytes != self.layout.nbytes:
            raise SpanRefusedError(f"memory has {frame.nbytes} bytes, wanted {self.layout.nbytes}")
        self._memory = arrival.memory

    def _take_span(self, span: Span) -> None:
        if self._memory is None:
            raise SpanRefusedError("span came before its memory")
        self._coverage.add(span)
        most = max(1, COPY_BYTES // self.layout.geometry.token_bytes)
        layers, tokens = max(1, most // (span.token_stop - span.token)), min(most, span.token_stop - span.token)
        for layer in range(span.layer, span.layer_stop, layers):
            part = range(layer, min(layer + layers, span.layer_stop))
            for first in range(span.token, span.token_stop, tokens):
                stop = min(first + tokens, span.token_stop)
                last = (part.stop, stop) == (span.layer_stop, span.token_stop)
                self._copies.append((part, first, stop, last))

    def _take_done(self, done: Done) -> None:
        geometry = self.layout.geometry
        if self._memory is None:
            raise SpanRefusedError("done came before its memory")
        wanted = {
            "generation": (done.generation, self.lease.generation),
            "spans": (done.spans, self._coverage.spans),
            "dtype": (done.dtype, DTYPE_CODES[geometry.dtype]),
            "vocab": (done.vocab, geometry.vocab),
        }
        for name, (found, right) in wanted.items():
            if found != right:
                raise SpanRefusedError(f"done.{name} is {found}, wanted {right}")
        missing = self._coverage.missing()
        if missing:
            raise SpanRefusedError(f"done came before everything was there: {missing}")
        self._done = True
        self.timeline.computed, self.timeline.done = done.computed_ns, self._now_ns()

    def _take_failed(self, failed: Failed) -> None:
        if failed.generation != self.lease.generation:
            raise SpanRefusedError(f"failed.generation is {failed.generation}, wanted {self.lease.generation}")
        text = f"the source could not compute the prompt: {failed.text}"
        self.fail(OwnerError(_REASONS[failed.refusal], text))

    def _states(self, layers: range, first: int, stop: int) -> np.ndarray:
        """``[layers, 2, kv_heads, T, head_dim]`` of one cache group in the source's memory."""
        geometry, begin = self.layout.geometry, self.layout.first(layers.start)
        values = self._values(self.layout.offsets[layers.start], self.layout.offsets[layers.stop])
        region = values.reshape(len(layers), 2, geometry.kv_heads, self.layout.tokens - begin, geometry.head_dim)
        return region[:, :, :, first - begin : stop - begin]

    def _logits(self) -> np.ndarray:
        return self._values(self.layout.logits_offset, self.layout.nbytes)

    def _values(self, start: int, stop: int) -> np.ndarray:
        assert self._memory is not None
        return np.frombuffer(self._memory.data[start:stop], f"u{DTYPES[self.layout.geometry.dtype]}")


_REASONS: Final = {
    Refusal.MEMORY: Reason.MEMORY_SHORT,
    Refusal.WIDTH: Reason.CONTEXT_EXCEEDED,
    Refusal.IDENTITY: Reason.SOURCE_FAILED,
    Refusal.COMPUTE: Reason.SOURCE_FAILED,
    Refusal.ARGUMENT: Reason.SOURCE_FAILED,
}
