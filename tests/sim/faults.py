"""Every fault at every place where it can happen, and what comes of it.

    PYTHONPATH=tests python -m sim.faults            # compare with the table in git
    PYTHONPATH=tests python -m sim.faults --write    # write the table anew: then read its diff

The table is `faults.json`; docs/faults.md is made from it. A test run never writes it.
"""

from __future__ import annotations

import argparse
import errno
import json
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.plan import Require, Verify
from rowlock.daemon.owner.outcome import reason_of
from rowlock.journal.points import Moment, Point
from rowlock.v1.errors import OwnerError
from sim.device import Device
from sim.facts import Facts
from sim.laws import Watch, check_recovered, law_1_ready_is_proved
from sim.openings import OPENINGS, opening_rows
from sim.process import EndedError, Process, SimPoints
from sim.scenarios import SCENARIOS, Late, Scenario, World, honest, prepare

GOLDEN = Path(__file__).with_name("faults.json")
DEVICE_FAULTS = {
    "write_rows": (
        "error once", "error always", "flip once", "flip always", "torn once", "lost once", "neighbour once",
        "next_group once", "other_parent once", "kv once", "hang", "device lost",
    ),
    "read_rows": (
        "error once", "error always", "flip once", "flip always", "torn once", "stale once", "hang", "device lost",
    ),
    "fence": ("error once", "error always", "hang", "device lost"),
    "create_runtime": ("error once", "out of memory once", "hang", "device lost"),
    "close_runtime": ("error once", "error always", "hang"),
    "open_sequence": ("error once", "out of memory once", "hang"),
    "advance": ("error once", "hang", "device lost"),
}  # fmt: skip
FILE_FAULTS = ("error once", "error always", "no space always")
COMMIT_FAULTS = ("raises, not committed", "raises, committed", "raises, not synced", "journal lost")
STORES = ("undo", "pushed", "manifests", "assets", "ballast", "journal.sqlite")
SUSPECTS = {"other_parent once"}
"""Faults that leave bytes wrong where a transition does not read: what finds them is a verification of everything."""


@dataclass(frozen=True, order=True)
class Place:
    """Where a fault happens: an operation on a subject, in a phase of a scenario.

    The second write to an allocation in a phase is one to ``embed:2``, and so on; reads likewise.
    """

    scenario: str
    phase: str
    operation: str
    subject: str

    @property
    def faults(self) -> tuple[str, ...]:
        if self.operation in DEVICE_FAULTS:
            return DEVICE_FAULTS[self.operation]
        if self.operation.startswith("commit"):
            return COMMIT_FAULTS
        return FILE_FAULTS[:2] if self.operation == "read" else FILE_FAULTS

    @property
    def kind(self) -> tuple[str, str]:
        """Operation and subject, whichever of them in a row it is."""
        return self.operation, self.subject.partition(":")[0]


def verify_all(process: Process, models: Any) -> None:
    process.transition(models["b"], Require.B2, verify=Verify.ALL)


FAULTED = {
    name: SCENARIOS[name]
    for name in (
        "first_load",
        "restart",
        "b2",
        "b2_served",
        "b1",
        "unload",
        "push",
        "rollback",
        "b2_restored",
        "b2_unloaded",
        "b1_failed",
    )
} | {"b2_all": Scenario("b2_all", ("a",), verify_all)}
ONLY_PHASES = {
    "b2_restored": ("restore",),
    "b2_unloaded": ("restore",),
    "b1_failed": ("restore",),
    "b2_all": ("apply", "verify"),
    "b2_served": ("",),
    "rollback": ("", "stage", "apply"),
    "push": ("", "stage", "apply"),
}
"""Scenarios whose other phases are those of another scenario."""
NAMES = [*OPENINGS, *FAULTED]


class Injector:
    """Lets one fault happen at one place; without a fault it notes the places that there are."""

    def __init__(self, scenario: Scenario, place: Place | None, fault: str) -> None:
        self.places: list[Place] = []
        self.process: Process | None = None
        self.points = SimPoints()
        self.points.observers.append(self._at)
        self.armed = False
        self._scenario = scenario
        self._own = Late(scenario.hook() if scenario.hook else honest)
        self._place = place
        self._fault = fault
        self._commit = ""
        self._begun = False
        self._calls: Counter[tuple[str, str]] = Counter()

    def arm(self) -> None:
        self.armed = self._own.armed = True
        self._calls.clear()

    def device(self, device: Device, operation: str, subject: str) -> str:
        subject = subject or "device"
        if operation in {"fence", "write_rows", "read_rows"}:
            self._calls[operation, subject] += 1
            number = self._calls[operation, subject]
            subject = f"{subject}:{number}" if number > 1 else subject
        if not self._hits(operation, subject):
            return self._own(device, operation, subject)
        return self._device_effect(operation)

    def disk(self, operation: str, path: str) -> None:
        store = next((item for item in STORES if path.startswith(f"/var/state/{item}")), "")
        if store == "journal.sqlite":
            self._journal(operation, path)
        elif store and self._hits(operation, store):
            code = errno.ENOSPC if "space" in self._fault else errno.EIO
            raise OSError(code, f"injected: {operation}", path)

    def _at(self, point: Point, moment: Moment, _subject: str) -> None:
        if point is Point.PHASE:
            self._calls.clear()
        if point.startswith("commit"):
            self._commit = point.value if moment is Moment.BEFORE else ""
            if self._commit:
                self._note(point.value, "journal")

    def _journal(self, operation: str, path: str) -> None:
        at_commit = self._commit == (self._place.operation if self._place else "?")
        wanted = {"raises, not committed": "write", "raises, not synced": "sync"}.get(self._fault, "")
        dead = self._fault == "journal lost" and (self._begun or at_commit) and operation != "read"
        once = at_commit and operation == wanted and path.endswith("-wal") and not self._begun
        if self.armed and self._place is not None and (dead or once):
            self._begun = True
            raise OSError(errno.EIO, f"injected: {operation}", path)

    def committed(self) -> None:
        at_commit = self._place is not None and self._commit == self._place.operation
        if self.armed and at_commit and self._fault == "raises, committed" and not self._begun:
            self._begun = True
            raise sqlite3.OperationalError("injected: COMMIT")

    def _note(self, operation: str, subject: str) -> None:
        place = Place(self._scenario.name, self.points.phase, operation, subject)
        if self.armed and place not in self.places:
            self.places.append(place)

    def _hits(self, operation: str, subject: str) -> bool:
        if operation in {"allocate", "release"}:
            return False
        self._note(operation, subject)
        if not self.armed or self._place is None or self._place.operation.startswith("commit"):
            return False
        if self._begun and self._fault == "device lost":
            return operation in DEVICE_FAULTS
        place = Place(self._scenario.name, self.points.phase, operation, subject)
        here = place == self._place
        again = self._fault.endswith("always") and place.kind == self._place.kind
        if (here and not self._begun) or (self._begun and again):
            self._begun = True
            return True
        return False

    def _device_effect(self, operation: str) -> str:
        kind = self._fault.removesuffix(" once").removesuffix(" always")
        if kind == "hang":
            assert self.process is not None
            self.process.expire(operation)
            return ""
        if kind in {"error", "device lost", "out of memory"}:
            fault = DeviceFault.OUT_OF_MEMORY if kind == "out of memory" else DeviceFault.LOST
            raise DeviceError(fault, f"injected: {operation} failed")
        return kind


def places(world: World, scenario: Scenario) -> list[Place]:
    """Every place of a scenario, in the order in which they come."""
    injector = Injector(scenario, None, "")
    _act(world, scenario, injector).close()
    only = ONLY_PHASES.get(scenario.name)
    return [place for place in injector.places if only is None or place.phase in only]


def outcome(world: World, scenario: Scenario, place: Place, fault: str) -> str:
    """What a fault comes to: how the transition ended, what is served then, and after a restart.

    The laws are checked on the way; an outcome that breaks one is an AssertionError.
    """
    injector = Injector(scenario, place, fault)
    process = _act(world, scenario, injector)
    try:
        told = _ended(process)
        if fault in SUSPECTS and _is_wrong(process, world):
            assert not process.verify().ok, "wrong bytes that a verification does not find"
            told += ", other bytes than published: found by verify"
        else:
            law_1_ready_is_proved(process, world.truth)
        promised = Facts.of(process.disk)
    finally:
        process.close()
    return f"{told}; restart: {_restarted(world, scenario, process, promised)}"


def _act(world: World, scenario: Scenario, injector: Injector) -> Process:
    disk, device = prepare(world, scenario.base)
    watch = Watch(world.truth)
    watch.proves_ready = False
    injector.points.observers.append(watch.observer)
    if scenario.act is None:
        injector.arm()
    process = Process(disk, device, "p", injector.device, injector.points, **scenario.settings)
    injector.process = watch.process = process
    disk.fail, disk.committed = injector.disk, injector.committed
    process.refused = ""
    try:
        process.start(world.models[scenario.initial] if scenario.initial else None)
        injector.arm()
        if scenario.act is not None:
            scenario.act(process, world.models)
    except (OwnerError, DeviceError, OSError) as error:
        process.refused = reason_of(error).value
    except EndedError:
        process.refused = "the owner thread is given up"
    injector.armed = False
    return process


def _ended(process: Process) -> str:
    view, rows = process.owner.view, process.journal.transitions(1)
    record = process.record(rows[0].id) if rows and rows[0].id.startswith("p") else None
    parts = [f"refused: {process.refused}"] if process.refused else []
    if record is not None:
        parts.append(f"{rows[0].state} {record.reason}".strip())
    return f"{', '.join(parts) or 'nothing began'}; {_serves(process)}" if view else ""


def _serves(process: Process) -> str:
    view = process.owner.view
    if view.quarantined or view.resident is None:
        return view.state.value
    return f"{view.state.value} on generation {view.resident.generation}"


def _is_wrong(process: Process, world: World) -> bool:
    view = process.owner.view
    return (
        view.resident is not None
        and not view.quarantined
        and not world.truth.is_on(process.device, view.resident.model.identity.weights)
    )


def _restarted(world: World, scenario: Scenario, before: Process, promised: Facts) -> str:
    disk, device = before.disk.copy(), before.device.after_process(survives=True, seed=0)
    process = Process(disk, device, "q", **scenario.settings).start()
    try:
        check_recovered(process, world.truth, replace(promised, transitions={}))
        return _serves(process)
    finally:
        process.close()


def rows(world: World, scenario: Scenario) -> Iterator[dict[str, str]]:
    """The table, as far as it is of one scenario; places with the same outcome are one row."""
    found: dict[tuple[str, ...], list[str]] = {}
    for place in places(world, scenario):
        for fault in place.faults:
            key = (place.phase, place.operation, fault, outcome(world, scenario, place, fault))
            found.setdefault(key, []).append(place.subject)
    for (phase, operation, fault, told), subjects in found.items():
        yield {
            "scenario": scenario.name, "phase": phase, "operation": operation, "subjects": " ".join(subjects),
            "fault": fault, "outcome": told,
        }  # fmt: skip


def table_of(world: World, name: str) -> list[dict[str, str]]:
    """All rows of one scenario, or of one kind of opening."""
    return list(opening_rows(world, name) if name in OPENINGS else rows(world, FAULTED[name]))


def golden() -> dict[str, list[dict[str, str]]]:
    """The table in git, by scenario."""
    found: dict[str, list[dict[str, str]]] = {name: [] for name in NAMES}
    for row in json.loads(GOLDEN.read_text()):
        found[row["scenario"]].append(row)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sim.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the table anew")
    parser.add_argument("--only", choices=NAMES)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rowlock-faults-") as root:
        world = World.make(Path(root) / "models")
        found = {name: table_of(world, name) for name in NAMES if options.only in {None, name}}
    if options.write:
        table = {**(golden() if GOLDEN.exists() else {}), **found}
        lines = ",\n".join(json.dumps(row) for name in NAMES for row in table.get(name, []))
        GOLDEN.write_text(f"[\n{lines}\n]\n")
        return 0
    wrong = differences(found)
    print("\n".join(wrong) or "as in the table")
    return 1 if wrong else 0


def differences(found: dict[str, list[dict[str, str]]]) -> list[str]:
    """Rows of some scenarios that are not in the table in git, and those of it that did not come about."""
    table = golden()
    return [f"new: {row}" for name in found for row in found[name] if row not in table[name]] + [
        f"gone: {row}" for name in found for row in table[name] if row not in found[name]
    ]


if __name__ == "__main__":
    sys.exit(main())
