"""A simulated owner against a small model of one: any order of what can happen to it.

The model knows generations, their names and what came before them, and nothing of how it is done.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rowlock.bindings.plan import Level, Require
from rowlock.daemon.owner.admission import Admission
from rowlock.daemon.owner.options import Options
from rowlock.v1.errors import OwnerError
from sim.crash import Camera
from sim.device import Device, Hook
from sim.disk import Crash, Disk
from sim.facts import Facts
from sim.laws import Watch, check_image, check_recovered, law_1_ready_is_proved, law_10_one_identity
from sim.process import Process, SimPoints
from sim.scenarios import Late, World, flips, honest, stuck

WEIGHTS = st.sampled_from(["a", "b", "c"])
TARGETS = st.sampled_from(["a", "b", "c", "assets", "program"])
REQUIRES = st.sampled_from([Require.AUTO, Require.B1])
WAYS = st.tuples(st.sampled_from(Crash), st.booleans(), st.integers(0, 2**32))


@dataclass
class Model:
    """What an owner is, as far as anybody outside can tell.

    Attributes:
        names: checkpoint by generation.
        previous: generation by generation.
        current: what was published last.
        serves: whether it is resident.
        quarantined: and nothing can be done.

    """

    names: dict[int, str] = field(default_factory=dict)
    previous: dict[int, int | None] = field(default_factory=dict)
    current: int | None = None
    serves: bool = False
    quarantined: bool = False

    @property
    def name(self) -> str:
        assert self.current is not None
        return self.names[self.current]

    def publish(self, generation: int, name: str) -> None:
        assert generation > max(self.names, default=0)
        self.names[generation] = name
        self.previous[generation] = self.current
        self.current, self.serves = generation, True


class OwnerMachine(RuleBasedStateMachine):
    """See the module's text."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.disk, self.device, self.model = Disk(), Device(), Model()
        self.processes = 0

    def teardown(self) -> None:
        self.process.close()

    @initialize()
    def first_load(self) -> None:
        self.process = self._process(Facts())
        self.process.start(self.world.models["a"])
        self.model.publish(1, "a")

    @invariant()
    def it_is_what_the_model_is(self) -> None:
        view = self.process.owner.view
        assert bool(view.quarantined) == self.model.quarantined
        assert (view.state == "READY") == (self.model.serves and not self.model.quarantined)
        if view.state == "READY":
            assert view.resident is not None
            assert view.resident.generation == self.model.current
            assert view.resident.model.checkpoint == str(self.world.models[self.model.name])
        law_1_ready_is_proved(self.process, self.world.truth)
        assert not self.device.hazards

    @precondition(lambda self: self.model.serves and not self.model.quarantined)
    @rule(name=TARGETS, require=REQUIRES)
    def plan(self, name: str, require: Require) -> None:
        plan, target = self.process.plan(self.world.models[name], require)
        target.close()
        assert (plan.level is Level.NOOP) == (name == self.model.name and require is Require.AUTO)

    @precondition(lambda self: not self.model.quarantined)
    @rule(name=TARGETS, require=REQUIRES)
    def transition_or_load(self, name: str, require: Require) -> None:
        record = self.process.record(self.process.transition(self.world.models[name], require))
        same = self.model.serves and name == self.model.name and require is Require.AUTO
        assert record.state == ("NOOP" if same else "PUBLISHED"), record.message
        if not same:
            self.model.publish(record.generation, name)

    @precondition(lambda self: self.model.serves and not self.model.quarantined)
    @rule(name=WEIGHTS, fault=st.sampled_from(["once", "always", "stuck"]))
    def transition_that_goes_wrong(self, name: str, fault: str) -> None:
        if self.world.truth.parents[self._weights(name)] == self.world.truth.parents[self._weights(self.model.name)]:
            return
        self._spoil({"once": flips(1)(), "always": flips(1000)(), "stuck": stuck()}[fault])
        plan, _ = self.process.plan(self.world.models[name])
        record = self.process.record(self.process.transition(self.world.models[name]))
        self._spoil(honest)
        ends = {"once": "ROLLED_BACK", "always": "UNLOADED", "stuck": "QUARANTINED"}
        assert record.state == ends[fault], record.message
        assert plan.level in {Level.B1, Level.B2}
        self.model.serves = fault == "once"
        self.model.quarantined = fault == "stuck"

    @precondition(lambda self: self.model.serves and not self.model.quarantined)
    @rule(name=WEIGHTS)
    def cancel(self, name: str) -> None:
        if name == self.model.name:
            return
        answer = self.process.ask(20)
        self.process.turn()
        plan, target = self.process.plan(self.world.models[name])
        asked = self.process.owner.admit(Admission("transition", plan, target, Options()))
        self.process.turn_until(asked.done)
        self.process.owner.cancel(asked.result())
        self.process.settle()
        assert self.process.record(asked.result()).state == "CANCELLED"
        assert len(answer.wait()) == 20
        law_10_one_identity(answer, self.world.truth)

    @precondition(lambda self: self.model.serves and not self.model.quarantined)
    @rule()
    def rollback(self) -> None:
        assert self.model.current is not None
        before = self.model.previous[self.model.current]
        if before is None:
            with pytest.raises(OwnerError):
                self.process.rollback()
            return
        record = self.process.record(self.process.rollback())
        assert record.state == "PUBLISHED", record.message
        self.model.publish(record.generation, self.model.names[before])

    @precondition(lambda self: self.model.serves and not self.model.quarantined)
    @rule()
    def unload(self) -> None:
        assert self.process.record(self.process.unload()).state == "UNLOADED"
        self.model.serves = False

    @precondition(lambda self: self.model.serves and not self.model.quarantined)
    @rule()
    def verify(self) -> None:
        assert self.process.verify().ok

    @rule(tokens=st.integers(1, 5))
    def generate(self, tokens: int) -> None:
        answer = self.process.ask(tokens)
        if not self.model.serves or self.model.quarantined:
            self.process.turn()
            with pytest.raises(OwnerError):
                answer.wait()
            return
        self.process.settle()
        assert len(answer.wait()) == tokens
        law_10_one_identity(answer, self.world.truth)

    @rule(way=WAYS)
    def restart(self, way: tuple[Crash, bool, int]) -> None:
        promised = Facts.of(self.disk)
        self.process.close()
        self._start_again(self.disk, self.device, way, promised)

    @precondition(lambda self: self.model.serves and not self.model.quarantined)
    @rule(name=WEIGHTS, moment=st.floats(0, 1, exclude_max=True), way=WAYS)
    def crash(self, name: str, moment: float, way: tuple[Crash, bool, int]) -> None:
        """In the middle of a transition: afterwards it is old or new."""
        camera = Camera(self.watch)
        self.watch.promised = Facts.of(self.disk)
        camera.begin(self.disk, self.device, self.process.points)
        self.process.transition(self.world.models[name])
        self.process.close()
        image = camera.images[int(moment * len(camera.images))]
        new = self._start_again(image.disk, image.device, way, image.promised)
        if new is not None:
            self.model.publish(new, name)

    @precondition(lambda self: self.model.quarantined)
    @rule(way=WAYS)
    def release(self, way: tuple[Crash, bool, int]) -> None:
        self.process.owner.release_quarantine("somebody", "looked at the device")
        self.process.close()
        self.model.quarantined = False
        self._start_again(self.disk, self.device, way, Facts.of(self.disk))

    def _start_again(self, disk: Disk, device: Device, way: tuple[Crash, bool, int], promised: Facts) -> int | None:
        """A new process after a crash; the generation that it found published, if the model does not know it."""
        crash, survives, seed = way
        self.disk, self.device = disk.after(crash, seed), device.after_process(survives=survives, seed=seed)
        check_image(self.disk, promised)
        self.process = self._process(promised)
        self.process.start()
        facts = check_recovered(self.process, self.world.truth, promised)
        self.model.serves = not self.model.quarantined
        return facts.current if facts.current != self.model.current else None

    def _process(self, promised: Facts) -> Process:
        self.processes += 1
        self.watch, points, self.hook = Watch(self.world.truth), SimPoints(), Late(honest)
        points.observers, self.watch.promised = [self.watch.observer], promised
        process = Process(self.disk, self.device, f"m{self.processes}-", self.hook, points)
        self.watch.process = process
        return process

    def _spoil(self, hook: Hook) -> None:
        self.hook.inner, self.hook.armed = hook, True

    def _weights(self, name: str) -> str:
        return self.world.weights["a" if name in {"assets", "program"} else name]


def test_any_order_of_events_is_as_the_model_says(world: World) -> None:
    """Other orders: pytest -k any_order --hypothesis-seed=N."""

    class Bound(OwnerMachine):
        pass

    Bound.world = world
    run_state_machine_as_test(Bound, settings=settings(max_examples=20, stateful_step_count=15, deadline=None))
