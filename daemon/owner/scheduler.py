"""Which requests run: admission, steps, leases."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from rowlock.bindings.device import DeviceError, DeviceFault, Preempted, Runtime, Sequence, Step
from rowlock.daemon.owner.imports import Importing, Imports
from rowlock.daemon.owner.prefilling import Prefiller
from rowlock.daemon.owner.requests import GenerationRequest, Lease, Sink, check_context
from rowlock.daemon.owner.resident import Resident
from rowlock.v1.errors import OwnerError, Reason

ACTIVE_MAX: Final = 8
"""Requests that decode at the same time, unless told otherwise."""
SPARE_TOKENS: Final = 64
"""Tokens by which a request should have room to grow when it is let in."""
WAITING_MAX: Final = 256
"""Requests that wait for admission; past it they are refused."""


@dataclass
class _Active:
    """A request that runs, or was preempted.

    Attributes:
        prompt: its tokens.
        left: tokens that it may still have.
        computed: tokens that it has got.
        replaying: it was preempted, and has got no token since: it does not have its pages again yet.

    """

    request: GenerationRequest
    lease: Lease
    sequence: Sequence
    eos: frozenset[int]
    prompt: int
    left: int
    since: float
    computed: int = 0
    replaying: bool = False

    @property
    def soon(self) -> int:
        """Tokens that it should have room for when it goes on."""
        return _soon(self.prompt + self.computed, self.left)


@dataclass(frozen=True)
class Served:
    """What was computed since the process started.

    Attributes:
        steps: of the model.
        prompt_tokens: of admitted requests.
        tokens: generated.
        preemptions: requests that gave their pages up, to compute them again.

    """

    steps: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    preemptions: int = 0


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
    """Runs requests on the resident model, one token of each at every step; who came first is served first.

    While admission is closed nothing new starts; what has started goes on to its end. A request that is preempted keeps
    its lease, waits before all others, and may go on while admission is closed; so may one whose prompt is computed
    elsewhere.

    Attributes:
        admitting: whether admission is open.
        served: what was computed so far.

    """

    def __init__(self, monotonic: Callable[[], float], slots: int = ACTIVE_MAX) -> None:
        self._monotonic = monotonic
        self.stepped = -math.inf
        self._slots = slots
        self._imports: Imports | None = None
        self._blocked = False
        self._waiting: deque[GenerationRequest] = deque()
        self._active: list[_Active] = []
        self._preempted: deque[_Active] = deque()
        self._admitting: GenerationRequest | None = None
        self.admitting = True
        self.served = Served()

    def compute_prompts_with(self, prefiller: Prefiller) -> None:
        """Have prompts computed elsewhere from now on."""
        self._imports = Imports(prefiller)

    @property
    def steps(self) -> int:
        """Of the model, taken so far."""
        return self.served.steps

    @property
    def active(self) -> int:
        """Requests that hold a lease, the preempted ones and those whose prompts are on their way among them."""
        return len(self._active) + len(self._preempted) + len(self._importing)

    @property
    def decoding(self) -> bool:
        """Whether steps are taken for requests just now; none are for prompts that are only on their way."""
        return bool(self._active)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def runnable(self, resident: Resident | None) -> bool:
        """Whether a step would do anything."""
        if self._active or resident is None:
            return bool(self._active)
        if self._imports is not None and self._imports.ready:
            return True
        if self._preempted:
            return True
        blocked = self._blocked and bool(self._importing)
        return bool(self._waiting) and self.admitting and self.active < self._places and not blocked

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
        self._drop_hung_up()
        if self._imports is not None:
            self._imports.prefiller.step()
            self._fail_imports()
        if resident is not None:
            self._readmit(resident.runtime)
            self._let_in_imports(resident)
            self._make_room(resident.runtime)
            self._admit_waiting(resident)
            if self._active:
                self._advance(resident.runtime)
        self.check_integrity()

    def fail_all(self, error: Exception, *, abandon: bool = False) -> None:
        """End every request, active or waiting, with an error; with ``abandon`` the device is not asked anything."""
        if self._admitting is not None:
            self._admitting.sink.failed(error)
            self._admitting = None
        self.cancel_active(error, abandon=abandon)
        self.fail_waiting(error)

    def cancel_active(self, error: Exception, *, abandon: bool = False) -> None:
        """End every running request with an error."""
        for active in self._leased:
            self._end(active)
            active.request.sink.failed(error)
        for item in self._importing:
            self._end_import(item, error, abandon=abandon)

    @property
    def leases(self) -> tuple[LeaseHeld, ...]:
        """Who holds the resident weights."""
        now = self._monotonic()
        return tuple(
            LeaseHeld(item.request.id, item.lease.generation, now - item.since, item.computed) for item in self._leased
        ) + tuple(LeaseHeld(item.request.id, item.lease.generation, now - item.since, 0) for item in self._importing)

    @property
    def sinks(self) -> list[Sink]:
        """Of every request, active or waiting: for the one who has to fail them from outside."""
        admitting = [self._admitting.sink] if self._admitting else []
        active = [item.request.sink for item in self._leased]
        importing = [item.request.sink for item in self._importing]
        return admitting + active + importing + [item.sink for item in list(self._waiting)]

    @property
    def _leased(self) -> list[_Active]:
        """The oldest first."""
        return [*list(self._active), *list(self._preempted)]

    @property
    def _promised(self) -> list[int]:
        """Tokens of each of those that go on after a preemption, and may not have all of their pages again."""
        return [item.soon for item in self._active if item.replaying]

    @property
    def _importing(self) -> list[Importing]:
        return list(self._imports.items) if self._imports is not None else []

    @property
    def _places(self) -> int:
        """For requests with a lease: those that run, and those whose prompts are computed ahead."""
        return self._slots + (self._imports.prefiller.ahead if self._imports is not None else 0)

    def _drop_cancelled(self) -> None:
        for request in [item for item in self._waiting if item.cancelled.is_set()]:
            self._waiting.remove(request)
            request.sink.failed(OwnerError(Reason.CANCELLED, "the client gave up"))

    def fail_waiting(self, error: Exception) -> None:
        while self._waiting:
            self._waiting.popleft().sink.failed(error)

    def check_integrity(self) -> None:
        assert len(self._leased) <= self._slots
        assert self.active <= self._places
        leased: list[_Active | Importing] = [*self._leased, *self._importing]
        assert len({id(item.request) for item in leased}) == len(leased)
        assert len({item.lease.generation for item in leased}) <= 1, "two identities at once"

    def _admit_waiting(self, resident: Resident) -> None:
        """In their order, until one finds no room: none that came later is let in before it."""
        room, ahead = True, self._promised
        while room and self.admitting and self._waiting and self.active < self._places and not self._preempted:
            self._admitting = self._waiting.popleft()
            let_in = len(self._active)
            room = self._admit(self._admitting, resident, ahead)
            if not room:
                self._waiting.appendleft(self._admitting)
            ahead += [item.soon for item in self._active[let_in:]]
            self._admitting = None
        self._blocked = not room

    def _admit(self, request: GenerationRequest, resident: Resident, ahead: list[int]) -> bool:
        """Let a request in, or end it; False when there is no room for it beside those of ``ahead`` tokens each."""
        if request.cancelled.is_set():
            request.sink.failed(OwnerError(Reason.CANCELLED, "the client gave up"))
            return True
        lease = Lease(resident.model.identity, resident.generation, resident.text)
        try:
            prompt, new = _prompt_tokens(request, resident)
            busy = self._active or self._importing
            if busy and not resident.runtime.has_room(*ahead, _soon(len(prompt), new)):
                return False
            if self._imports is not None and self._imports.prefiller.takes(prompt):
                return self._imports.begin(request, lease, prompt, new, resident, self._monotonic())
            if len(self._leased) >= self._slots:
                return False
            if self._imports is not None:
                self._imports.prefiller.note_local(prompt)
            sequence = resident.runtime.open_sequence(prompt, request.sampling, len(prompt) + new)
        except Exception as error:  # noqa: BLE001 - this request fails, others go on
            request.sink.failed(_failure(error))
            return True
        self._start(request, lease, sequence, (len(prompt), new), self._monotonic())
        return True

    def _start(
        self, request: GenerationRequest, lease: Lease, sequence: Sequence, tokens: tuple[int, int], since: float
    ) -> _Active:
        """A request runs from now on: ``tokens`` are those of its prompt, and the new ones that it may have."""
        prompt, new = tokens
        eos = frozenset() if request.ignore_eos else frozenset(lease.text.eos_tokens)
        active = _Active(request, lease, sequence, eos, prompt, new, since)
        self._active.append(active)
        self.served = replace(self.served, prompt_tokens=self.served.prompt_tokens + prompt)
        request.sink.started(lease, prompt)
        return active

    def _let_in_imports(self, resident: Resident) -> None:
        """Those whose prompts are here, while there are places."""
        while self._imports is not None and len(self._leased) < self._slots:
            item = self._imports.complete
            if item is None:
                return
            try:
                sequence, step = item.remote.admit(resident)
            except Exception as error:  # noqa: BLE001 - this request fails, others go on
                self._end_import(item, _failure(error))
                continue
            self._imports.items.remove(item)
            self._take(self._start(item.request, item.lease, sequence, item.tokens, item.since), step)

    def _fail_imports(self) -> None:
        for item in self._importing:
            if item.remote.error is not None:
                self._end_import(item, item.remote.error)

    def _end_import(self, item: Importing, error: Exception, *, abandon: bool = False) -> None:
        assert self._imports is not None
        self._imports.items.remove(item)
        item.remote.end(abandon=abandon)
        item.request.sink.failed(error)

    def _readmit(self, runtime: Runtime) -> None:
        """Those that gave their pages up go on, in their order, once there is room."""
        while self._preempted and self._has_room_again(runtime):
            self._active.append(self._preempted.popleft())
            self._active[-1].replaying = True

    def _has_room_again(self, runtime: Runtime) -> bool:
        """Whether who gave up its pages, the oldest, would find them now."""
        return runtime.has_room(*self._promised, self._preempted[0].soon)

    def _make_room(self, runtime: Runtime) -> None:
        """For who gave up its pages and does not fit: the prompt that came last, and cannot run yet, waits again."""
        if not self._preempted or (self._active and len(self._leased) < self._slots):
            return
        if self._has_room_again(runtime):  # something has ended in this very step
            return
        if self._imports is not None and self._imports.items:
            item = self._imports.items.pop()
            item.remote.end()
            self._waiting.appendleft(item.request)
            return
        if self._active:
            return
        lost = self._preempted[0]  # with every page its own it does not fit: pages are quarantined
        self._end(lost)
        lost.request.sink.failed(OwnerError(Reason.CACHE_EXCEEDED, "its pages were given up, and too few are left"))

    def _drop_hung_up(self) -> None:
        for active in [item for item in self._leased if item.request.cancelled.is_set()]:
            self._end(active)
            active.request.sink.failed(OwnerError(Reason.CANCELLED, "the client gave up"))
        for item in self._importing:
            if item.request.cancelled.is_set():
                self._end_import(item, OwnerError(Reason.CANCELLED, "the client gave up"))

    def _advance(self, runtime: Runtime) -> None:
        """One step of every active request, as one batch."""
        batch = list(self._active)
        try:
            steps = runtime.advance([active.sequence for active in batch])
        except Exception as error:  # noqa: BLE001 - these requests fail, the owner goes on
            self.cancel_active(_failure(error))
            return
        finally:
            self.served, self.stepped = replace(self.served, steps=self.served.steps + 1), self._monotonic()
        for active, step in zip(batch, steps, strict=True):
            self._take(active, step)
        for active, step in reversed(list(zip(batch, steps, strict=True))):
            if isinstance(step, Preempted):
                self._active.remove(active)
                self._preempted.appendleft(active)
                self.served = replace(self.served, preemptions=self.served.preemptions + 1)

    def _take(self, active: _Active, step: Step) -> None:
        sink = active.request.sink
        if isinstance(step, DeviceError):
            self._end(active)
            sink.failed(_failure(step))
            return
        if step is None or isinstance(step, Preempted):
            return
        active.replaying = False
        stopped = step in active.eos
        if not stopped:
            sink.token(step)
            active.left -= 1
            active.computed += 1
            self.served = replace(self.served, tokens=self.served.tokens + 1)
        if stopped or active.left == 0:
            self._end(active)
            sink.finished(stopped=stopped)

    def _end(self, active: _Active) -> None:
        active.sequence.close()
        (self._active if active in self._active else self._preempted).remove(active)


def _soon(tokens: int, left: int) -> int:
    """Tokens of a request that it should have room for when it is let in: else it would soon be preempted."""
    return tokens + min(left, SPARE_TOKENS)


def _failure(error: Exception) -> OwnerError:
    if isinstance(error, OwnerError):
        return error
    if isinstance(error, DeviceError) and error.fault is DeviceFault.CAPACITY:
        return OwnerError(Reason.CACHE_EXCEEDED, str(error))
    if isinstance(error, DeviceError):
        return OwnerError(Reason.DEVICE_FAILED, str(error))
    return OwnerError(Reason.INTERNAL, repr(error))


def _most_new(prompt: int, resident: Resident) -> int:
    """Tokens that may follow a prompt: what the context and the pages have left, but at least one."""
    held = resident.runtime.cache.tokens_max
    most = resident.config.context if held is None else min(resident.config.context, held)
    return max(most - prompt, 1)


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
    new = _most_new(len(prompt), resident) if request.max_tokens is None else request.max_tokens
    check_context(len(prompt), new, config.context)
    return prompt, new
