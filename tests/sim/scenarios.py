"""What simulated owners live through: each begins on a prepared disk, and does one thing."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from support.checkpoints import K0, read_tensor

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import layout_of
from rowlock.bindings.plan import Require
from rowlock.bindings.planner import Policy
from rowlock.journal.points import Moment, Point
from sim.device import Device, Hook
from sim.disk import Disk
from sim.laws import Truth, Watch
from sim.models import Models, expected_parents
from sim.process import Process, SimPoints

Act = Callable[[Process, Models], None]


@dataclass(frozen=True)
class World:
    """A disk, a device, and how to run a process on them."""

    models: Models
    truth: Truth
    weights: dict[str, str]

    @classmethod
    def make(cls, root: Path) -> World:
        models, truth = Models.make(root), Truth()
        weights = {name: weights_root(models[name]) for name in ("a", "b", "c")}
        for name in ("a", "b", "c"):
            with Checkpoint.open(models[name]) as checkpoint:
                layout = layout_of(checkpoint, parse_config(models[name], checkpoint.config))
            for placement in layout.placements.values():
                info = placement.tensor
                for group in range(info.groups):
                    first, _ = info.group_span(group)
                    truth.places[info.name, group] = (placement.parent, placement.offset + first * info.row_bytes)
            truth.parents[weights[name]] = expected_parents(models[name])
        return cls(models, truth, weights)


def weights_root(directory: Path) -> str:
    """The name under which a checkpoint's weights are published, from a process of its own."""
    process = Process(Disk(), Device(), "root").start(directory)
    try:
        resident = process.owner.view.resident
        assert resident is not None, process.owner.view.reason
        return resident.model.identity.weights
    finally:
        process.close()


@dataclass(frozen=True)
class Scenario:
    """One thing that happens to an owner.

    Attributes:
        base: what happened before, by name of another list of acts.
        acts: done by a process that has started; none: the start itself is what is looked at.
        initial: the checkpoint given at the start.
        hook: makes a hook that lets the device fail.
        settings: of the daemon.
        releases: a quarantine may end in it.
        drifts: bytes on the device change that nobody has told to; READY is proved again only at its end.

    """

    name: str
    base: tuple[str, ...]
    act: Act | None
    initial: str = ""
    hook: Callable[[], Hook] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    releases: bool = False
    drifts: bool = False


def _to(name: str, **options: Any) -> Act:
    return lambda process, models: _ignore(
        process.transition(models[name], Require.B2, f"{process.name}to-{name}", **options)
    )


def _reload(name: str) -> Act:
    return lambda process, models: _ignore(process.transition(models[name], Require.B1, f"{process.name}load-{name}"))


def _rollback(process: Process, models: Models) -> None:
    process.rollback()


def _unload(process: Process, models: Models) -> None:
    process.unload()


def _push(process: Process, models: Models) -> None:
    """The rows that make ``a`` into ``c``."""
    raw = read_tensor(models["c"], K0)
    size = len(raw) // 16
    process.push({K0: {row: raw[row * size : (row + 1) * size] for row in (0, 1, 15)}})


def _noop(process: Process, models: Models) -> None:
    process.transition(models["a"])


def _release(process: Process, models: Models) -> None:
    process.owner.release_quarantine("somebody", "looked at the device")


def _repair(process: Process, models: Models) -> None:
    """A bit flips in two allocations; a verification finds it, and what it sets off puts it right."""
    for parent in ("embed", "norm"):
        process.device.slots[parent][77] ^= 1
    process.verify()
    process.settle()


def _served(process: Process, models: Models) -> None:
    """A transition between requests."""
    process.ask(6)
    process.turn()
    process.transition(models["b"], Require.B2)
    process.ask(3)
    process.settle()


def _unsure(process: Process, models: Models) -> None:
    """The COMMIT of the publish raises, and has taken effect."""
    armed = [False]

    def observe(point: Point, moment: Moment, _subject: str) -> None:
        armed[0] = point is Point.COMMIT_PUBLISH and moment is Moment.BEFORE

    def committed() -> None:
        if armed[0]:
            armed[0] = False
            raise sqlite3.OperationalError("injected: COMMIT")

    process.points.observers.append(observe)
    process.disk.committed = committed
    process.transition(models["b"], Require.B2)


def _lost(process: Process, models: Models) -> None:
    """The COMMIT of the publish raises, and has not taken effect."""
    before, armed = process.disk.fail, [False]

    def observe(point: Point, moment: Moment, _subject: str) -> None:
        armed[0] = point is Point.COMMIT_PUBLISH and moment is Moment.BEFORE

    def fail(operation: str, path: str) -> None:
        before(operation, path)
        if armed[0] and operation == "write":
            armed[0] = False
            raise OSError(errno.EIO, "injected: write", path)

    process.points.observers.append(observe)
    process.disk.fail = fail
    process.transition(models["b"], Require.B2)


def _ignore(_result: object) -> None:
    pass


def honest(_device: Device, _operation: str, _subject: str) -> str:
    """Nothing goes wrong."""
    return ""


def flips(count: int) -> Callable[[], Hook]:
    """The next writes are stored with one bit wrong."""

    def make() -> Hook:
        left = [count]

        def hook(_device: Device, operation: str, _subject: str) -> str:
            if operation == "write_rows" and left[0]:
                left[0] -= 1
                return "flip"
            return ""

        return hook

    return make


def stuck() -> Hook:
    """Every write is stored wrong, and no runtime can be closed."""

    def hook(_device: Device, operation: str, _subject: str) -> str:
        if operation == "close_runtime":
            raise DeviceError(DeviceFault.LOST, "injected: close failed")
        return "flip" if operation == "write_rows" else ""

    return hook


def _rollback_to_first(process: Process, models: Models) -> None:
    process.rollback(to=1)


BASES: dict[str, tuple[str, Act | None]] = {
    "a": ("a", None),
    "b": ("", _to("b")),
    "c": ("", _to("c")),
    "push": ("", _push),
    "quarantine": ("", _to("b")),
}
_MEMORY = {"policy": Policy(undo_durable_max=0)}

SCENARIOS = {
    item.name: item
    for item in (
        Scenario("first_load", (), None, initial="a"),
        Scenario("restart", ("a", "b"), None),
        Scenario("restart_pushed", ("a", "push"), None),
        Scenario("restart_quarantined", ("a", "quarantine"), None),
        Scenario("release", ("a", "quarantine"), _release, releases=True),
        Scenario("b2", ("a",), _to("b")),
        Scenario("b2_served", ("a",), _served),
        Scenario("b2_memory_undo", ("a",), _to("b"), settings=_MEMORY),
        Scenario("b2_unsure", ("a",), _unsure),
        Scenario("b2_lost", ("a",), _lost),
        Scenario("rollback", ("a", "b"), _rollback),
        Scenario("rollback_to_first", ("a", "b", "c"), _rollback_to_first),
        Scenario("restart_spoiled", ("a", "b"), None, hook=flips(1)),
        Scenario("rollback_pushed", ("a", "push"), _rollback),
        Scenario("push", ("a",), _push),
        Scenario("repair", ("a",), _repair, drifts=True),
        Scenario("assets", ("a",), _to("assets")),
        Scenario("noop", ("a",), _noop),
        Scenario("b1", ("a",), _reload("program")),
        Scenario("unload", ("a",), _unload),
        Scenario("b2_restored", ("a",), _to("b"), hook=flips(1)),
        Scenario("b2_unloaded", ("a",), _to("b"), hook=flips(1000)),
        Scenario("b2_quarantined", ("a",), _to("b"), hook=stuck),
        Scenario("b1_failed", ("a",), _reload("program"), hook=flips(1)),
    )
}


def prepare(world: World, base: tuple[str, ...], *, stopped: bool = False) -> tuple[Disk, Device]:
    """Disk and device after what happened before, its last process killed, or stopped."""
    disk, device = _prepared(world.models.root, base, stopped)
    return disk.copy(), device.copy()


@cache
def _prepared(root: Path, base: tuple[str, ...], stopped: bool) -> tuple[Disk, Device]:
    disk, device, models = Disk(), Device(), Models(root)
    for number, name in enumerate(base):
        initial, act = BASES[name]
        hook = Late(stuck() if name == "quarantine" else honest)
        process = Process(disk, device, f"base{number}-", hook)
        process.start(models[initial] if initial else None)
        hook.armed = True
        if act is not None:
            act(process, models)
        if stopped and name == base[-1]:
            process.journal.close()  # and with it the WAL, which every later process would have to read
        process.close()
        disk, device = disk.copy(), device.after_process(survives=True, seed=0)
        disk.fail = lambda _operation, _path: None
    return disk, device


class Late:
    """A hook that does nothing until it is armed."""

    def __init__(self, inner: Hook) -> None:
        self.inner = inner
        self.armed = False

    def __call__(self, device: Device, operation: str, subject: str) -> str:
        return self.inner(device, operation, subject) if self.armed else ""


def run(
    world: World, scenario: Scenario, disk: Disk, device: Device, watch: Watch,
    began: Callable[[Disk, Device, SimPoints], None],
) -> Process:  # fmt: skip
    """Let a scenario happen; ``began`` is called when what it is about begins. The caller closes the process."""
    hook, points = Late(scenario.hook() if scenario.hook else honest), SimPoints()
    points.observers = [watch.observer]
    if scenario.act is None:
        began(disk, device, points)
        hook.armed = True
    process = Process(disk, device, f"{scenario.name}-", hook, points, **scenario.settings)
    watch.process = process
    process.start(world.models[scenario.initial] if scenario.initial else None)
    watch.proves_ready = not scenario.drifts
    if scenario.act is not None:
        began(disk, device, points)
        hook.armed = True
        scenario.act(process, world.models)
    return process
