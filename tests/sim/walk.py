"""Random lives of an owner: transitions and crashes, one after the other, as many as are asked for."""

from __future__ import annotations

import random
from dataclasses import replace

from rowlock.v1.errors import OwnerError
from sim.crash import Camera, CrashError
from sim.device import Device
from sim.disk import Crash, Disk
from sim.facts import Facts
from sim.laws import Watch, check_image, check_recovered, law_5_twice_is_once
from sim.process import Process, SimPoints
from sim.scenarios import SCENARIOS, Late, Scenario, World, honest

ACTS = [item for item in SCENARIOS.values() if item.act is not None and not item.releases]


class Walk:
    """One life, that a seed decides.

    Args:
        world: models and truth.
        seed: decides everything.
        crashes: how many there are.

    """

    def __init__(self, world: World, seed: int, crashes: int) -> None:
        self.world = world
        self.crashes = crashes
        self.told: list[str] = []
        self._rng = random.Random(seed)
        self._processes = 0

    def run(self) -> None:
        disk, device, promised = Disk(), Device(), Facts()
        try:
            for _ in range(self.crashes):
                disk, device, promised = self._live_and_crash(disk, device, promised)
            self._recover_twice(disk, device, promised)
        except Exception as error:
            raise CrashError(f"{' -> '.join(self.told)}: {error!r}") from error

    def _live_and_crash(self, disk: Disk, device: Device, promised: Facts) -> tuple[Disk, Device, Facts]:
        """A process that starts, is checked, does something, and crashes at any moment of all that."""
        scenario = self._rng.choice(ACTS)
        watch, points = Watch(self.world.truth), SimPoints()
        watch.promised = promised
        camera = Camera(watch)
        points.observers = [watch.observer]
        camera.begin(disk, device, points)
        process, hook = self._process(disk, device, points, scenario)
        watch.process = process
        process.start(self.world.models["a"])
        check_recovered(process, self.world.truth, promised)
        watch.proves_ready = not scenario.drifts
        self._act(process, hook, scenario, watch)
        process.close()
        image = self._rng.choice(camera.images)
        crash, survives, seed = self._rng.choice(list(Crash)), self._rng.random() < 0.5, self._rng.getrandbits(32)
        self.told.append(f"{scenario.name}, {image.label}, {crash}, {'survives' if survives else 'lost'}")
        disk = image.disk.after(crash, seed)
        check_image(disk, image.promised)
        return disk, image.device.after_process(survives=survives, seed=seed), image.promised

    def _act(self, process: Process, hook: Late, scenario: Scenario, watch: Watch) -> None:
        assert scenario.act is not None
        hook.armed = True
        try:
            if process.owner.view.quarantined:
                watch.promised = replace(watch.promised, quarantined=False)
                process.owner.release_quarantine("somebody", "looked at the device")
            else:
                scenario.act(process, self.world.models)
        except OwnerError:
            pass  # refused: a rollback of the first generation, a request id used before

    def _recover_twice(self, disk: Disk, device: Device, promised: Facts) -> None:
        found = []
        for _ in range(2):
            points = SimPoints()
            process, _ = self._process(disk, device, points, None)
            process.start()
            found.append(check_recovered(process, self.world.truth, promised))
            process.close()
            disk, device, promised = disk.copy(), device.after_process(survives=True, seed=0), found[-1]
        law_5_twice_is_once(found[0], found[1])

    def _process(
        self, disk: Disk, device: Device, points: SimPoints, scenario: Scenario | None
    ) -> tuple[Process, Late]:
        self._processes += 1
        hook = Late(scenario.hook() if scenario and scenario.hook else honest)
        settings = scenario.settings if scenario else {}
        return Process(disk, device, f"w{self._processes}-", hook, points, **settings), hook
