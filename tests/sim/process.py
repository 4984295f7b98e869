"""One owner process on a simulated disk and a simulated device, in one thread.

Everything between them is the real thing: owner, transitions, recovery, journal, files, SQLite.
The test is the owner thread; workers run what they are given at once, so a run is the same each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from support.owners import Answer

from rowlock.bindings.checkpoint.hashing import Hasher
from rowlock.bindings.device import Sampling
from rowlock.bindings.plan import Plan, Require
from rowlock.daemon.owner.admission import Admission
from rowlock.daemon.owner.context import Context
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.pushing import PushedRows
from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.owner.requests import GenerationRequest
from rowlock.daemon.owner.scheduler import Scheduler
from rowlock.daemon.owner.stage import Stager
from rowlock.daemon.owner.startup import Startup
from rowlock.daemon.owner.target import Target
from rowlock.daemon.owner.verification import Verification
from rowlock.daemon.owner.watchdog import AbandonedError
from rowlock.daemon.service import assemble
from rowlock.daemon.settings import Settings
from rowlock.journal.files import Files
from rowlock.journal.journal import Journal
from rowlock.journal.points import Moment, Point
from sim.device import Device, Hook, SimBinding
from sim.disk import Disk
from sim.file_system import SimFileSystem
from sim.vfs import sim_vfs

STATE = Path("/var/state")
PROMPT = (1, 2, 3)
Observer = Callable[[Point, Moment, str], None]


class Inline(Executor):
    """Runs what it is given at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            result = fn(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            future.set_exception(error)
        else:
            future.set_result(result)
        return future


class SimClock:
    """A millisecond passes whenever somebody looks."""

    def __init__(self) -> None:
        self._ticks = itertools.count()

    def now(self) -> float:
        return 1000.0 + next(self._ticks) / 1000

    monotonic = now


class OneThreadLock:
    """A lock of a world with one thread: whoever would wait for it, waits for himself."""

    def __init__(self) -> None:
        self._held = False

    def __enter__(self) -> None:
        assert not self._held, "a read waits for a write"
        self._held = True

    def __exit__(self, *_error: object) -> None:
        self._held = False


class SimPoints:
    """Hands every point on to those who look, and knows the phase."""

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self.phase = ""

    def at(self, point: Point, moment: Moment, subject: str) -> None:
        if point is Point.PHASE and moment is Moment.BEFORE:
            self.phase = subject
        for observer in list(self.observers):
            observer(point, moment, subject)
        if point is Point.PHASE and moment is Moment.AFTER:
            self.phase = ""


class EndedError(Exception):
    """The owner thread has ended."""


class Process:
    """See the module's text.

    Args:
        disk: taken over; it must not be used by another process.
        device: likewise.
        hook: may make device operations fail or lie.
        name: makes ids that no other process makes.
        points: told of every point, from the opening of the journal on.
        settings: of the daemon.

    """

    def __init__(
        self, disk: Disk, device: Device, name: str, hook: Hook = lambda *_: "", points: SimPoints | None = None,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.disk = disk
        self.device = device
        self.name = name
        self.points = points or SimPoints()
        self.logged: list[tuple[str, dict[str, Any]]] = []
        self.refused = ""
        self.answers: list[Answer] = []
        self._connect = sim_vfs().attach(disk)
        ids = itertools.count(1)
        files = Files(SimFileSystem(disk), self.points)
        files.keep_directory(STATE)
        self.journal = Journal(STATE, "sim", files, self._connect)
        self.journal._file._lock = OneThreadLock()  # type: ignore[assignment]
        self.journal._file._reader_lock = OneThreadLock()  # type: ignore[assignment]
        clock, inline = SimClock(), Inline()
        self.binding = SimBinding(device, hook)
        context = Context(
            clock,
            lambda: f"{name}{next(ids)}",
            inline,
            inline,
            lambda _nbytes: Stager(inline),
            inline,
            self._log,
            self.points,
        )
        chosen = Settings("sim", STATE, STATE / "unused.sock", **settings)
        scheduler = Scheduler(clock.monotonic)
        self.owner = assemble(chosen, context, self.binding, self.journal, files, scheduler, Hasher(inline))

    def start(self, initial: Path | None = None, *, reload: bool = True) -> Process:
        """Recover, and load."""
        started = self.owner.begin(Startup(initial, reload))
        self.turn_until(started.done)
        return self

    def close(self) -> None:
        """The process is gone; its disk and its device are as they were left."""
        sim_vfs().detach(self.disk)

    def turn_until(self, done: Callable[[], bool]) -> None:
        owner = self.owner
        while not done():
            mailbox, jobs, core = owner._mailbox, owner._jobs, owner._core
            resident = None if core.quarantined else core.resident
            assert mailbox._commands or jobs.ready or core.scheduler.runnable(resident) or mailbox.closed, (
                "there is nothing left to do, and it has not happened"
            )
            self.turn()

    def turn(self) -> None:
        try:
            self.owner.turn()
        except AbandonedError:
            raise EndedError from None

    def expire(self, call: str) -> None:
        """The watchdog's deadline for the running device call passes."""
        watchdog = self.owner._watchdog
        watchdog._abandoned = True
        watchdog._expired(f"the device call {call} did not come back within a simulated deadline")

    # What callers do.

    def plan(self, directory: Path, require: Require = Require.AUTO, **options: Any) -> tuple[Plan, Target]:
        return self.owner.planner.transition(self.owner.view.resident, directory, require, Options(**options))

    def transition(self, directory: Path, require: Require = Require.AUTO, request_id: str = "", **options: Any) -> str:
        """The id of a transition that has ended. Raises OwnerError when it is refused."""
        plan, target = self.plan(directory, require, **options)
        return self.admit(Admission("transition", plan, target, Options(**options), request_id, request_id))

    def rollback(self, to: int = 0, **options: Any) -> str:
        plan, target = self.owner.planner.rollback(self.owner.view.resident, to, Options(**options))
        return self.admit(Admission("rollback", plan, target, Options(**options)))

    def unload(self) -> str:
        return self.admit(Admission("unload", None, None, Options()))

    def push(self, rows: dict[str, dict[int, bytes]], **options: Any) -> str:
        resident = self.owner.view.resident
        assert resident is not None
        pushed = PushedRows({name: item.tensor for name, item in resident.model.layout.placements.items()}, 1 << 30)
        for tensor, items in rows.items():
            for row, data in items.items():
                pushed.add(tensor, row, data)
        asked = self.owner.target_of_push(pushed)
        self.turn_until(asked.done)
        target = asked.result()
        plan = self.owner.planner.plan(resident, target, Require.B2, Options(**options))
        return self.admit(Admission("push", plan, target, Options(**options)))

    def admit(self, admission: Admission) -> str:
        asked = self.owner.admit(admission)
        self.turn_until(asked.done)
        transition = asked.result()
        self.settle()
        return str(transition)

    def settle(self) -> None:
        """Go on until every job has ended and every request is answered."""
        owner = self.owner
        scheduler = owner._core.scheduler
        self.turn_until(lambda: not (owner._jobs or owner._mailbox._commands or scheduler.active or scheduler.waiting))

    def verify(self) -> Verification:
        asked = self.owner.verify()
        self.turn_until(asked.done)
        return asked.result()

    def ask(self, tokens: int = 4) -> Answer:
        """A request, queued."""
        answer = Answer()
        self.answers.append(answer)
        self.owner.generate(GenerationRequest("r", PROMPT, tokens, Sampling(), True, answer))
        return answer

    def record(self, transition: str) -> TransitionRecord:
        row = self.journal.find(transition)
        assert row is not None
        return TransitionRecord.from_json(row.record)

    def _log(self, event: str, **fields: Any) -> None:
        self.logged.append((event, fields))
