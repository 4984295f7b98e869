"""The laws, over everything that simulated owners live through, with nothing crashing.

Each scenario ends as it must, every law is looked at on the way and at the end, whoever asks
afterwards is answered, and a restart changes nothing of it.
"""

from __future__ import annotations

import pytest

from rowlock.bindings.plan import Require
from sim.device import Device
from sim.disk import Disk
from sim.facts import Facts
from sim.laws import Watch, check_image, check_recovered, law_1_ready_is_proved, law_10_one_identity
from sim.process import Process, SimPoints
from sim.scenarios import SCENARIOS, Late, World, flips, prepare, run

ENDS = {
    "first_load": ("PUBLISHED", "READY", 1),
    "restart": ("PUBLISHED", "READY", 2),
    "restart_pushed": ("PUBLISHED", "READY", 2),
    "restart_quarantined": ("QUARANTINED", "QUARANTINED", 1),
    "restart_spoiled": ("PUBLISHED", "EMPTY", 2),
    "release": ("QUARANTINED", "QUARANTINED", 1),
    "b2": ("PUBLISHED", "READY", 2),
    "b2_served": ("PUBLISHED", "READY", 2),
    "b2_memory_undo": ("PUBLISHED", "READY", 2),
    "b2_unsure": ("PUBLISHED", "READY", 2),
    "b2_lost": ("ROLLED_BACK", "READY", 1),
    "rollback": ("PUBLISHED", "READY", 3),
    "rollback_to_first": ("PUBLISHED", "READY", 4),
    "rollback_pushed": ("PUBLISHED", "READY", 3),
    "push": ("PUBLISHED", "READY", 2),
    "repair": ("PUBLISHED", "READY", 2),
    "assets": ("PUBLISHED", "READY", 2),
    "noop": ("NOOP", "READY", 1),
    "b1": ("PUBLISHED", "READY", 2),
    "unload": ("UNLOADED", "EMPTY", 1),
    "b2_restored": ("ROLLED_BACK", "READY", 1),
    "b2_unloaded": ("UNLOADED", "EMPTY", 1),
    "b2_quarantined": ("QUARANTINED", "QUARANTINED", 1),
    "b1_failed": ("ROLLED_BACK", "READY", 1),
}
"""How the last transition ended, what the owner is then, and the generation that was published last."""


def nothing(_disk: Disk, _device: Device, _points: SimPoints) -> None:
    """Look at nothing more than the laws."""


def test_every_scenario_is_here() -> None:
    assert ENDS.keys() == SCENARIOS.keys()


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_laws_hold_and_it_ends_as_it_must(world: World, name: str) -> None:
    scenario = SCENARIOS[name]
    disk, device = prepare(world, scenario.base)
    watch = Watch(world.truth)
    watch.promised = Facts.of(disk)
    process = run(world, scenario, disk, device, watch, nothing)
    state, serves, generation = ENDS[name]
    facts = check_image(disk, Facts())
    assert max(facts.transitions.values(), key=lambda item: item.number).state == state
    assert process.owner.view.state == serves
    assert facts.current == generation
    law_1_ready_is_proved(process, world.truth)
    if serves == "READY":
        process.ask(3)  # the lock is released, whatever the way out was
        process.settle()
    assert not device.hazards, device.hazards
    for answer in process.answers:
        assert len(answer.wait()) in {3, 6}
        law_10_one_identity(answer, world.truth)
    process.close()
    after = Process(disk.copy(), device.after_process(survives=True, seed=0), "after-", **scenario.settings).start()
    check_recovered(after, world.truth, facts)
    quarantined = serves == "QUARANTINED" and name != "release"
    assert after.owner.view.state == ("QUARANTINED" if quarantined else "READY")
    after.close()


def test_a_restoration_answers_for_the_whole_model(world: World) -> None:
    """Bytes that are wrong beside what a transition touches are not served once it has had to be undone."""
    disk, device = prepare(world, ("a",))
    hook = Late(flips(1)())
    process = Process(disk, device, "p", hook).start()
    device.slots["embed"][77] ^= 1  # not touched on the way to c
    hook.armed = True
    record = process.record(process.transition(world.models["c"], Require.B2))
    assert (record.state, record.reason) == ("UNLOADED", "VERIFY_MISMATCH")
    assert process.owner.view.state == "EMPTY"
    process.close()
