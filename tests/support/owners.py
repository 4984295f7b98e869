"""A whole owner in this process: the real thread, journal, files and CPU binding."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.device import Sampling
from rowlock.bindings.plan import Require
from rowlock.daemon.owner.admission import Admission
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.owner import Owner
from rowlock.daemon.owner.pushing import PushedRows
from rowlock.daemon.owner.record import RowRange, TransitionRecord
from rowlock.daemon.owner.requests import GenerationRequest, Lease
from rowlock.daemon.owner.startup import Startup
from rowlock.daemon.owner.verification import Verification
from rowlock.daemon.service import build_owner
from rowlock.daemon.settings import Settings
from support.devices import device_of_owners

WAIT_S = 180


class NullLog:
    def info(self, *_args: Any, **_fields: Any) -> None:
        """Say nothing."""

    warning = error = info


@dataclass
class Answer:
    """A sink that collects an answer."""

    events: queue.Queue[Any] = field(default_factory=queue.Queue)
    lease: Lease | None = None
    tokens: list[int] = field(default_factory=list)
    stopped: bool | None = None

    def started(self, lease: Lease, prompt_tokens: int) -> None:
        self.lease = lease
        self.events.put("started")

    def token(self, token: int) -> None:
        self.tokens.append(token)
        self.events.put(token)

    def finished(self, *, stopped: bool) -> None:
        self.stopped = stopped
        self.events.put(None)

    def failed(self, error: Exception) -> None:
        self.events.put(error)

    def wait(self) -> list[int]:
        """All tokens. Raises what the request failed with."""
        while True:
            item = self.events.get(timeout=WAIT_S)
            if isinstance(item, Exception):
                raise item
            if item is None:
                return self.tokens

    def wait_token(self) -> None:
        while not isinstance(self.events.get(timeout=WAIT_S), int):
            pass

    @property
    def identity(self) -> Identity:
        assert self.lease is not None
        return self.lease.identity


class OwnerHarness:
    """An owner and short ways to use it."""

    def __init__(self, owner: Owner, state: Path, load_failure: BaseException | None = None) -> None:
        self.load_failure = load_failure
        self.owner = owner
        self.state = state

    def begin(self, target: Path, require: Require = Require.AUTO, **options: Any) -> str:
        """Plan and admit; the transition's id."""
        chosen = Options(**options)
        plan, opened = self.owner.planner.transition(self.owner.view.resident, target, require, chosen)
        return self.owner.admit(Admission("transition", plan, opened, chosen)).result(WAIT_S)

    def transition(self, target: Path, require: Require = Require.AUTO, **options: Any) -> TransitionRecord:
        return self.end_of(self.begin(target, require, **options))

    def rollback(self, to: int = 0, **options: Any) -> TransitionRecord:
        chosen = Options(**options)
        plan, opened = self.owner.planner.rollback(self.owner.view.resident, to, chosen)
        return self.end_of(self.owner.admit(Admission("rollback", plan, opened, chosen)).result(WAIT_S))

    def unload(self) -> TransitionRecord:
        return self.end_of(self.owner.admit(Admission("unload", None, None, Options())).result(WAIT_S))

    def push(self, rows: dict[str, dict[int, bytes]], **options: Any) -> TransitionRecord:
        resident, chosen = self.owner.view.resident, Options(**options)
        assert resident is not None
        pushed = PushedRows({name: item.tensor for name, item in resident.model.layout.placements.items()}, 1 << 30)
        for tensor, items in rows.items():
            for row, data in items.items():
                pushed.add(tensor, row, data)
        target = self.owner.target_of_push(pushed).result(WAIT_S)
        plan = self.owner.planner.plan(resident, target, Require.B2, chosen)
        return self.end_of(self.owner.admit(Admission("push", plan, target, chosen)).result(WAIT_S))

    def writes(self, record: TransitionRecord) -> list[RowRange]:
        return [RowRange(*item) for item in json.loads(self.owner.journal.writes(record.id))]

    def end_of(self, transition: str) -> TransitionRecord:
        """The record of a transition once it has ended."""
        news: queue.Queue[None] = queue.Queue()

        def listener() -> None:
            news.put(None)

        self.owner.followers.add(transition, listener)
        try:
            while self.owner.is_live(transition):
                news.get(timeout=WAIT_S)
        finally:
            self.owner.followers.remove(transition, listener)
        return self.record(transition)

    def record(self, transition: str) -> TransitionRecord:
        row = self.owner.journal.find(transition)
        assert row is not None
        return TransitionRecord.from_json(row.record)

    def ask(self, prompt: str | tuple[int, ...] = "hello", max_tokens: int = 12, **options: Any) -> Answer:
        answer = Answer()
        sampling = options.pop("sampling", Sampling())
        ignore_eos = options.pop("ignore_eos", True)
        self.owner.generate(GenerationRequest("r", prompt, max_tokens, sampling, ignore_eos, answer, **options))
        return answer

    def tokens(self, prompt: str = "hello", max_tokens: int = 12) -> list[int]:
        return self.ask(prompt, max_tokens).wait()

    def verify(self) -> Verification:
        return self.owner.verify().result(WAIT_S)

    @property
    def identity(self) -> Identity:
        resident = self.owner.view.resident
        assert resident is not None
        return resident.model.identity

    def stray_write(self, parent: str, row: int) -> None:
        """Change one row of the device behind the owner's back."""
        resident = self.owner.view.resident
        assert resident is not None
        allocation, memory = resident.runtime.allocations[parent], self.core.binding.memory._inner
        data = np.empty(allocation.parent.row_bytes, np.uint8)
        memory.read_rows(allocation, row, data)
        data[0] ^= 1
        memory.write_rows(allocation, row, data)
        memory.fence()

    @property
    def core(self) -> Any:
        """The owner's inside: for planting trouble, never for checking outcomes."""
        return self.owner._core


@contextmanager
def running_owner(
    state: Path,
    checkpoint: Path | None,
    fault_file: Path | None = None,
    plant: Callable[[OwnerHarness], None] = lambda _owner: None,
    **settings: Any,
) -> Iterator[OwnerHarness]:
    """An owner that has finished loading, or failing to, on the device of this run; ``plant`` comes before."""
    device = device_of_owners()
    if device.arm is not None:
        device.arm(fault_file or state / "no-fault.json")
        fault_file = None
    chosen = Settings(
        state=state,
        socket=state / "unused.sock",
        checkpoint=checkpoint,
        threads=2,
        fault_file=fault_file,
        **{**device.settings, **settings},
    )
    with ExitStack() as closing:
        owner = build_owner(chosen, closing, NullLog())
        plant(OwnerHarness(owner, state))
        started = owner.start(Startup(checkpoint, chosen.reload))
        try:
            yield OwnerHarness(owner, state, started.exception(WAIT_S))
        finally:
            owner.stop()
