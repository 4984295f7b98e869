"""Crashes at every point, as far as a test run has time for; `make sim` goes deeper."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from support.checkpoints import K0

from rowlock.journal.files import Files
from rowlock.journal.journal import Journal
from rowlock.journal.points import Moment, Point
from sim.crash import Explorer
from sim.device import Device
from sim.disk import Crash, Disk
from sim.facts import Facts
from sim.file_system import SimFileSystem
from sim.laws import law_10_one_identity
from sim.process import STATE, Process
from sim.scenarios import SCENARIOS, World, prepare
from sim.vfs import sim_vfs
from sim.walk import Walk

DEPTHS = {"restart_pushed": 2, "release": 1, "b2": 1}


@pytest.mark.parametrize("name", DEPTHS)
def test_every_crash_ends_old_or_new_or_quarantined(world: World, name: str) -> None:
    explorer = Explorer(world, seed=0, depth=DEPTHS[name])
    explorer.explore(SCENARIOS[name])
    assert explorer.report.recoveries > 5


@pytest.mark.parametrize("seed", range(5))
def test_a_random_life_keeps_the_laws(world: World, seed: int) -> None:
    """Rerun one: make sim SIM='--only walks --walks 1 --seed SEED'."""
    Walk(world, seed, crashes=4).run()


def test_a_new_state_directory_survives_a_power_cut(world: World) -> None:
    disk = Disk()
    process = Process(disk, Device(), "p").start(world.models["a"])
    facts = Facts.read(process.journal._file._reader.conn)
    process.close()
    assert facts.current == 1
    assert Facts.of(disk.after(Crash.DROPPED, 0)) == facts


def test_an_answer_is_of_the_bytes_that_are_resident(world: World) -> None:
    """The simulated device can fail this law: one flipped bit changes every token."""
    disk, device = prepare(world, ("a",))
    process = Process(disk, device, "p").start()
    answer = process.ask(5)
    process.settle()
    law_10_one_identity(answer, world.truth)
    device.slots["embed"][77] ^= 1
    answer = process.ask(5)
    process.settle()
    with pytest.raises(AssertionError, match="law 10"):
        law_10_one_identity(answer, world.truth)
    process.close()


def test_the_disk_forgets_what_was_not_synced() -> None:
    disk = Disk()
    files = Files(SimFileSystem(disk))
    files.write(Path("/a"), [b"durable"])
    number = disk.create("/b")
    disk.write(number, 0, b"lost", "/b")
    disk.write(disk.names["/a"], 0, b"lost more", "/a")
    left = disk.after(Crash.DROPPED, 0)
    assert set(left.names) == {"/", "/a"}
    assert bytes(left.content(left.names["/a"])) == b"durable"
    killed = disk.after(Crash.KILLED, 0)
    assert bytes(killed.content(killed.names["/b"])) == b"lost"
    disk.sync(number, "/b")
    assert set(disk.after(Crash.DROPPED, 0).names) == {"/", "/a"}, "its name was not synced"
    disk.rename("/b", "/c")
    disk.sync_directory("/")
    assert set(disk.after(Crash.DROPPED, 0).names) == {"/", "/a", "/c"}


def test_sqlite_on_the_simulated_disk_loses_only_what_it_did_not_sync() -> None:
    """With the syncs of the WAL left out, a commit is lost: the VFS is what decides, and not luck."""
    disk = Disk()
    files = Files(SimFileSystem(disk))
    files.make_directory(STATE)
    journal = Journal(STATE, "sim", files, sim_vfs().attach(disk))
    journal.record_quarantine("kept", 1.0)
    kept = Facts.of(disk.after(Crash.DROPPED, 0))
    assert kept.quarantined
    disk.sync = lambda _number, _path: None  # type: ignore[method-assign]
    journal.release_quarantine("somebody", "nothing is synced any more", 2.0)
    assert not Facts.of(disk.after(Crash.KILLED, 0)).quarantined
    assert Facts.of(disk.after(Crash.DROPPED, 0)) == kept
    sim_vfs().detach(disk)


def test_memory_of_a_dead_process_is_never_believed(world: World) -> None:
    """In the world where device memory survives, it holds the rows of a transition that never published."""
    disk, device = prepare(world, ("a",))
    process = Process(disk, device, "p").start()
    process.device.slots["0.qkv"][:] = 0
    process.close()
    left = device.after_process(survives=True, seed=0)
    assert not left.slots["0.qkv"].any()
    after = Process(disk.after(Crash.KILLED, 0), left, "q").start()
    assert after.owner.view.state == "READY"
    assert world.truth.is_on(left, after.owner.view.resident.model.identity.weights)  # type: ignore[union-attr]
    after.close()
    assert K0 in {tensor for tensor, _ in world.truth.places}


def test_what_a_killed_process_left_is_made_durable(world: World) -> None:
    """Directories that are there, and were never synced: what is put into them survives all the same."""
    disk = Disk()
    for path in ("/var", "/var/state", "/var/state/undo", "/var/state/manifests", "/var/state/manifests/by-root"):
        disk.create(path, is_directory=True)
    disk = disk.after(Crash.KILLED, 0)
    process = Process(disk, Device(), "p").start(world.models["a"])
    transition = process.transition(world.models["b"])
    process.close()
    left = disk.after(Crash.DROPPED, 0)
    assert Facts.of(left).current == 2
    assert str(STATE / "undo" / f"{transition}.undo") in left.names
    assert str(STATE / "manifests" / "by-root" / f"{world.weights['a']}.safetensors") in left.names


def test_a_file_that_a_killed_process_named_is_made_durable(world: World) -> None:
    """Killed between the rename of a manifest and the sync of its directory: the next publish needs it to last.

    Recovery would sweep it, and then it would be written anew; here the sweep fails.
    """

    def stuck(operation: str, path: str) -> None:
        if operation == "remove" and "by-root" in path:
            raise OSError(errno.EIO, "injected: remove", path)

    disk, device = prepare(world, ("a",))
    process = Process(disk, device, "p").start()
    images: list[Disk] = []

    def observe(point: Point, moment: Moment, subject: str) -> None:
        if (point, moment) == (Point.SYNC_DIRECTORY, Moment.BEFORE) and subject.endswith("by-root"):
            images.append(disk.copy())

    process.points.observers.append(observe)
    process.transition(world.models["b"])
    process.close()
    killed = images[0].after(Crash.KILLED, 0)
    killed.fail = stuck
    process = Process(killed, device.after_process(survives=True, seed=0), "q").start()
    assert process.record(process.transition(world.models["b"])).state == "PUBLISHED"
    process.close()
    manifest = f"{world.weights['b']}.safetensors"
    assert str(STATE / "manifests" / "by-root" / manifest) in killed.after(Crash.DROPPED, 0).names
