"""Crash at every point, recover, crash again inside the recovery.

A run is watched at each named point, and before and after each effect on the disk; there the disk and
the device are copied as they are. Each copy is what a crash at that moment leaves, in several
ways, and a new process recovers from each: a crash costs no rerun of what came before it. Copies that
hold the same bytes are recovered from once; from the second crash on, copies that say the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from blake3 import blake3

from rowlock.journal.points import Moment, Point
from sim.device import Device
from sim.disk import Crash, Disk, known_name
from sim.facts import Facts
from sim.laws import (
    Watch,
    check_image,
    check_recovered,
    law_1_ready_is_proved,
    law_5_twice_is_once,
    law_10_one_identity,
)
from sim.process import Process, SimPoints
from sim.scenarios import Scenario, World, prepare, run

WAYS = tuple((crash, survives) for crash in Crash for survives in (True, False))
"""Ways to crash: what the disk forgets, and whether the device's memory survives the process."""


@dataclass(frozen=True)
class Image:
    """Disk and device at one moment, and what had been promised by then."""

    label: str
    disk: Disk
    device: Device
    promised: Facts


class Camera:
    """Takes an image at every named point and at every effect on the disk, where anything has changed."""

    def __init__(self, watch: Watch) -> None:
        self.images: list[Image] = []
        self.places: set[tuple[str, str, str]] = set()
        self._watch = watch
        self._last: tuple[int, int, Facts] = (0, 0, watch.promised)

    def begin(self, disk: Disk, device: Device, points: SimPoints) -> None:
        self._disk, self._device, self._points = disk, device, points
        points.observers.append(self._at)
        disk.fail = lambda operation, path: self._effect(f"before {operation}", path)
        disk.observe = lambda operation, path: self._effect(f"after {operation}", path)

    def _at(self, point: Point, moment: Moment, subject: str) -> None:
        self.places.add((self._points.phase, point, moment))
        self._take(f"{self._points.phase} {moment} {point} {_short(subject)}")

    def _effect(self, what: str, path: str) -> None:
        if not what.endswith((" write", " read", "truncate")):  # of these, what matters is when they are synced
            self._take(f"disk {what} {_short(path)}")

    def _take(self, label: str) -> None:
        now = (self._disk.version, self._device.version, self._watch.promised)
        if self.images and now[:2] == self._last[:2] and now[2] is self._last[2]:
            return  # nothing has changed since the last
        self._last = now
        name = f"{len(self.images)}: {label.strip()}"
        self.images.append(Image(name, self._disk.copy(), self._device.copy(), self._watch.promised))


def _short(subject: str) -> str:
    return subject.rpartition("/")[2][-24:]


@dataclass
class Report:
    """What an exploration did."""

    images: int = 0
    crashes: int = 0
    recoveries: int = 0

    def __add__(self, other: Report) -> Report:
        return Report(self.images + other.images, self.crashes + other.crashes, self.recoveries + other.recoveries)


class CrashError(AssertionError):
    """A law that is broken after a crash, with the way to see it again."""


class Explorer:
    """Explores the crashes of one scenario.

    Args:
        world: models and truth.
        seed: of what torn writes leave.
        depth: how often in a row an owner crashes.

    """

    def __init__(self, world: World, seed: int, depth: int) -> None:
        self.world = world
        self.seed = seed
        self.depth = depth
        self.report = Report()
        self.places: set[tuple[str, str, str]] = set()
        self._seen: set[bytes] = set()

    def explore(self, scenario: Scenario) -> None:
        watch = Watch(self.world.truth)
        camera = Camera(watch)
        disk, device = prepare(self.world, scenario.base, stopped=scenario.act is not None)
        watch.promised = replace(Facts.of(disk), quarantined=False) if scenario.releases else Facts.of(disk)
        process = run(self.world, scenario, disk, device, watch, camera.begin)
        process.close()
        self.places |= camera.places
        self.report.images += len(camera.images)
        for image in camera.images:
            self._crash(image, scenario, (image.label,), 1)

    def _crash(self, image: Image, scenario: Scenario, path: tuple[str, ...], depth: int) -> None:
        said = blake3(repr(image.promised).encode()).digest()
        for crash, survives in WAYS:
            here = (*path, f"{crash}, device memory {'survives' if survives else 'is lost'}")
            self.report.crashes += 1
            seed = self.seed + self.report.crashes
            disk = image.disk.after(crash, seed)
            device = image.device.after_process(survives=survives, seed=seed)
            key = disk.key()
            try:
                if self._is_new(key + said):
                    check_image(disk, image.promised)
                if self._is_new(key + device.key()):
                    self._recover(disk, device, image.promised, scenario, here, depth)
            except CrashError:
                raise
            except Exception as error:
                raise CrashError(f"{scenario.name}: {' -> '.join(here)}: {error!r}") from error

    def _recover(
        self, disk: Disk, device: Device, promised: Facts, scenario: Scenario, path: tuple[str, ...], depth: int
    ) -> None:
        facts = check_image(disk, promised)
        content = _logical(disk, facts)
        if not self._is_new(content + device.key()) and depth > 1:
            return
        new = self._is_new(content)
        self.report.recoveries += 1
        watch = Watch(self.world.truth)
        watch.promised = promised
        camera = Camera(watch)
        process = self._start(disk, device, watch, scenario, path, camera if new and depth < self.depth else None)
        after = check_recovered(process, self.world.truth, promised)
        process.close()
        if new:
            again = self._start(disk.copy(), device.after_process(survives=True, seed=0), watch, scenario, path, None)
            law_5_twice_is_once(after, check_recovered(again, self.world.truth, after))
            if depth == 1:
                self._go_on(again, watch)
            again.close()
        for image in camera.images:
            self._crash(image, scenario, (*path, image.label), depth + 1)

    def _go_on(self, process: Process, watch: Watch) -> None:
        """A recovered owner works, and what it promises from now on survives a power cut."""
        view, models = process.owner.view, self.world.models
        if not view.quarantined:
            process.transition(models["c"] if view.resident is not None else models["a"])
            process.ask(2)
            process.settle()
            law_10_one_identity(process.answers[-1], self.world.truth)
            law_1_ready_is_proved(process, self.world.truth)
        check_image(process.disk.after(Crash.DROPPED, 0), watch.promised)

    def _is_new(self, key: bytes) -> bool:
        new = key not in self._seen
        self._seen.add(key)
        return new

    def _start(
        self, disk: Disk, device: Device, watch: Watch, scenario: Scenario, path: tuple[str, ...], camera: Camera | None
    ) -> Process:
        points = SimPoints()
        watch.process, points.observers = None, [watch.observer]
        if camera is not None:
            camera.begin(disk, device, points)
        process = Process(disk, device, f"d{len(path)}-", points=points, **scenario.settings)
        watch.process = process
        return process.start()


def _logical(disk: Disk, facts: Facts) -> bytes:
    """What a disk says, however its bytes lie: what two recoveries may differ in."""
    files = [
        (known_name(path), b"" if "journal" in path else disk.inodes[number].digest(), path in disk.durable_names)
        for path, number in sorted(disk.names.items())
    ]
    return blake3(repr((facts, files)).encode()).digest()
