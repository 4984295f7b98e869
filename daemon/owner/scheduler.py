"""Which requests run: admission, steps, leases."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rowlock.bindings.device import DeviceError, Runtime, Sequence, Step
from rowlock.daemon.owner.requests import GenerationRequest, Lease, Sink
from rowlock.daemon.owner.resident import Resident
from rowlock.v1.errors import OwnerError, Reason

ACTIVE_MAX: Final = 8
"""Requests that decode at the same time."""
WAITING_MAX: Final = 256
"""Requests that wait for admission; past it they are refused."""


@dataclass
class _Active:
    request: GenerationRequest
    lease: Lease
    sequence: Sequence
    eos: frozenset[int]
    left: int
    since: float
    computed: int = 0


@dataclass(frozen=True)
class LeaseHeld:
    """A running request's hold of the resident weights.

    Attributes:
        held_s: for how long.
        tokens: computed so far.

    """

    request: str
    generation: int
    held_s: float
    tokens: int


class Scheduler:
    """Runs requests on the resident model, one token of each at every step.

    While admission is closed nothing new starts; what has started goes on to its end.

    Attributes:
        admitting: whether admission is open.
        steps: of the model, taken so far.

    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._waiting: deque[GenerationRequest] = deque()
        self._active: list[_Active] = []
        self._admitting: GenerationRequest | None = None
        self.admitting = True
        self.steps = 0
        self.tokens = 0
        """Computed for requests so far."""

    @property
    def active(self) -> int:
        return len(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def runnable(self, resident: Resident | None) -> bool:
        """Whether a step would do anything."""
        return bool(self._active) or bool(self._waiting and self.admitting and resident is not None)

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request.

        Raises:
            OwnerError: QUEUE_FULL.

        """
        if len(self._waiting) >= WAITING_MAX:
            self._drop_cancelled()
        if len(self._waiting) >= WAITING_MAX:
            raise OwnerError(Reason.QUEUE_FULL, f"{WAITING_MAX} requests are waiting already")
        self._waiting.append(request)

    def step(self, resident: Resident | None) -> None:
        """Admit what fits, then advance every active request by one step."""
        while self.admitting and resident is not None and self._waiting and len(self._active) < ACTIVE_MAX:
            self._admitting = self._waiting.popleft()
            self._admit(self._admitting, resident)
            self._admitting = None
        self._drop_hung_up()
        if self._active and resident is not None:
            self._advance(resident.runtime)
        self.check_integrity()

    def fail_all(self, error: Exception) -> None:
        """End every request, active or waiting, with an error."""
        if self._admitting is not None:
            self._admitting.sink.failed(error)
            self._admitting = None
        self.cancel_active(error)
        self.fail_waiting(error)

    def cancel_active(self, error: Exception) -> None:
        """End every running request with an error."""
        for active in list(self._active):
            self._end(active)
            active.request.sink.failed(error)

    @property
    def leases(self) -> tuple[LeaseHeld, ...]:
        """Who holds the resident weights."""
        now = self._monotonic()
        return tuple(
            LeaseHeld(item.request.id, item.lease.generation, now - item.since, item.computed) for item in self._active
        )

    @property
    def sinks(self) -> list[Sink]:
        """Of every request, active or waiting: for the one who has to fail them from outside."""
        admitting = [self._admitting.sink] if self._admitting else []
        active = [item.request.sink for item in list(self._active)]
        return admitting + active + [item.sink for item in list(self._waiting)]

    def _drop_cancelled(self) -> None:
        for request in [item for item in self._waiting if item.cancelled.is_set()]:
            self._waiting.remove(request)
            request.sink.failed(OwnerError(Reason.CANCELLED, "the client gave up"))

    def fail_waiting(self, error: Exception) -> None:
        while self._waiting:
            self._waiting.popleft().sink.failed(error)

    def check_integrity(self) -> None:
        assert len(self._active) <= ACTIVE_MAX
        assert len({id(item.request) for item in self._active}) == len(self._active)
        assert len({item.lease.generation for item in self._active}) <= 1, "two identities at once"

    def _admit(self, request: GenerationRequest, resident: Resident) -> None:
        if request.cancelled.is_set():
            request.sink.failed(OwnerError(Reason.CANCELLED, "the client gave up"))
            return
        lease = Lease(resident.model.identity, resident.generation, resident.text)
        try:
            prompt, new = _prompt_tokens(request, resident)
            sequence = resident.runtime.open_sequence(prompt, request.sampling, len(prompt) + new)
        except Exception as error:  # noqa: BLE001 - this request fails, others go on
            request.sink.failed(_failure(error))
            return
        eos = frozenset() if request.ignore_eos else frozenset(resident.text.eos_tokens)
        self._active.append(_Active(request, lease, sequence, eos, new, self._monotonic()))
        request.sink.started(lease, len(prompt))

    def _drop_hung_up(self) -> None:
        for active in [item for item in self._active if item.request.cancelled.is_set()]:
            self._end(active)
            active.request.sink.failed(OwnerError(Reason.CANCELLED, "the client gave up"))

    def _advance(self, runtime: Runtime) -> None:
        """One step of every active request, as one batch."""
        batch = list(self._active)
        try:
            steps = runtime.advance([active.sequence for active in batch])
        except Exception as error:  # noqa: BLE001 - these requests fail, the owner goes on
            self.cancel_active(_failure(error))
            return
        finally:
            self.steps += 1
        for active, step in zip(batch, steps, strict=True):
            self._take(active, step)

    def _take(self, active: _Active, step: Step) -> None:
        sink = active.request.sink
        if isinstance(step, DeviceError):
            self._end(active)
            sink.failed(_failure(step))
            return
        if step is None:
            return
        stopped = step in active.eos
        if not stopped:
            sink.token(step)
            active.left -= 1
            active.computed += 1
            self.tokens += 1
        if stopped or active.left == 0:
            self._end(active)
            sink.finished(stopped=stopped)

    def _end(self, active: _Active) -> None:
        active.sequence.close()
        self._active.remove(active)


def _failure(error: Exception) -> OwnerError:
    if isinstance(error, OwnerError):
        return error
    if isinstance(error, DeviceError):
        return OwnerError(Reason.DEVICE_FAILED, str(error))
    return OwnerError(Reason.INTERNAL, repr(error))


def _prompt_tokens(request: GenerationRequest, resident: Resident) -> tuple[tuple[int, ...], int]:
    """The prompt under the resident assets, tokenised again if they changed meanwhile; how many tokens may follow."""
    same = bool(request.assets) and request.assets == resident.text.digest
    prompt = request.tokens if same else resident.text.tokens_of(request.prompt)
    config = resident.config
    if not prompt:
        raise OwnerError(Reason.ARGUMENT_INVALID, "prompt: is empty")
    if max(prompt) >= config.vocab:
        raise OwnerError(
            Reason.ARGUMENT_INVALID, f"tokens: {max(prompt)} is not below the vocabulary of {config.vocab}"
        )
    left = config.context - len(prompt)
    new = left if request.max_tokens is None else request.max_tokens
    if new > left or left <= 0:
        raise OwnerError(
            Reason.CONTEXT_EXCEEDED,
            f"{len(prompt)} prompt tokens and {max(new, 1)} new ones exceed the context of {config.context}",
        )
    return prompt, new
