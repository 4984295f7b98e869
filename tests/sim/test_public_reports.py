"""What has hurt others who change the weights of live models, each as a test: docs/invariants.md has the list."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checkpoints import EMBED, K0, change_rows, negate, read_tensor

from rowlock.bindings.checkpoint import hashing
from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.plan import Require
from rowlock.daemon.owner import images, in_place, stage
from rowlock.daemon.owner.admission import Admission
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.retention import Retention
from rowlock.journal.points import Moment, Point
from rowlock.v1.errors import OwnerError, Reason
from sim.device import Device
from sim.disk import Disk
from sim.laws import Truth, law_10_one_identity
from sim.models import Models, expected_parents
from sim.process import STATE, Process
from sim.scenarios import weights_root


@pytest.fixture
def models(tmp_path: Path) -> Models:
    """Checkpoints of this test alone: they may be spoiled."""
    return Models.make(tmp_path / "models")


@pytest.fixture
def process(models: Models) -> Iterator[Process]:
    made = Process(Disk(), Device(), "p").start(models["a"])
    yield made
    made.close()


def holds(process: Process, directory: Path) -> bool:
    """Whether the device holds a checkpoint, every parent of it."""
    return Truth({"w": expected_parents(directory)}).is_on(process.device, "w")


def ended(process: Process, transition: str) -> str:
    return process.record(transition).state


def once_at(process: Process, point: Point, moment: Moment, act: Callable[[], None]) -> None:
    """Do something the first time that a point is reached."""
    left = [act]

    def observe(where: Point, when: Moment, _subject: str) -> None:
        if (where, when) == (point, moment) and left:
            left.pop()()

    process.points.observers.append(observe)


def test_memory_does_not_grow_with_updates(process: Process, models: Models) -> None:
    made, live = process.device.allocations, dict(process.device.live)
    files = set()
    for number in range(3 * Retention.undo_generations):
        assert ended(process, process.transition(models["b" if number % 2 == 0 else "a"], Require.B2)) == "PUBLISHED"
        if number >= Retention.undo_generations:
            files.add(len([path for path in process.disk.names if path.startswith(str(STATE))]))
    assert process.device.allocations == made
    assert process.device.live == live
    assert len(files) == 1, "the state directory stays as large as it is"


def test_reloads_free_what_they_replace(process: Process, models: Models) -> None:
    for name in ("program", "a", "program"):
        assert ended(process, process.transition(models[name], Require.B1)) == "PUBLISHED"
        assert process.device.live.keys() == expected_parents(models["a"]).keys()


def test_the_version_stays_when_the_apply_fails(process: Process, models: Models) -> None:
    process.binding.memory._hook = lambda _device, operation, _subject: "torn" if operation == "write_rows" else ""
    etag = process.owner.view.etag
    honest_again(process)
    assert ended(process, process.transition(models["b"], Require.B2)) == "ROLLED_BACK"
    resident = process.owner.view.resident
    assert resident is not None
    assert resident.generation == 1
    assert process.owner.view.etag == etag
    assert holds(process, models["a"])


def honest_again(process: Process) -> None:
    """From the restoration on the device stores what it is told."""
    memory = process.binding.memory

    def observe(point: Point, moment: Moment, subject: str) -> None:
        if (point, moment, subject) == (Point.PHASE, Moment.BEFORE, "restore"):
            memory._hook = lambda *_: ""

    process.points.observers.append(observe)


def test_a_rollback_does_not_read_the_new_files(process: Process, models: Models, tmp_path: Path) -> None:
    """The old directory holds something else by now: the undo is what leads back."""
    kept = shutil.copytree(models["a"], tmp_path / "kept")
    process.transition(models["b"], Require.B2)
    shutil.rmtree(models["a"])
    shutil.copytree(models["c"], models["a"])
    assert ended(process, process.rollback()) == "PUBLISHED"
    assert holds(process, kept)


def test_a_rollback_that_needs_the_old_files_refuses_new_ones(process: Process, models: Models) -> None:
    process.transition(models["program"], Require.B1)
    shutil.rmtree(models["a"])
    shutil.copytree(models["c"], models["a"])
    with pytest.raises(OwnerError) as caught:
        process.rollback()
    assert caught.value.reason is Reason.TARGET_CHANGED


def test_a_second_update_has_a_future_of_its_own(process: Process, models: Models) -> None:
    """What the first was told does not answer the second, whichever way either ends."""
    first = process.transition(models["b"], Require.B2)
    process.ask(30)
    process.turn()
    plan, target = process.plan(models["c"])
    asked = process.owner.admit(Admission("transition", plan, target, Options()))
    assert not asked.done()
    process.turn_until(asked.done)
    assert asked.result() != first
    assert process.record(asked.result()).state not in {"PUBLISHED", "NOOP"}, "the second is still on its way"
    process.settle()
    assert ended(process, asked.result()) == "PUBLISHED"
    assert holds(process, models["c"])


@pytest.mark.parametrize("point", [Point.COMMIT_INTENT, Point.FENCE, Point.WRITE_ROWS, Point.COMMIT_PUBLISH])
def test_a_request_that_comes_at_the_last_moment_is_the_new_identitys(
    process: Process, models: Models, point: Point
) -> None:
    """Whatever it passes on its way: it waits, and nothing of it runs on rows half written."""
    once_at(process, point, Moment.BEFORE, lambda: process.ask(3) and None)
    process.transition(models["b"], Require.B2)
    process.settle()
    (answer,) = process.answers
    assert len(answer.wait()) == 3
    truth = Truth({weights_root(models["b"]): expected_parents(models["b"])})
    law_10_one_identity(answer, truth)
    assert not process.device.hazards


def test_the_same_prompt_before_and_after_shares_no_keys_and_values(process: Process, models: Models) -> None:
    before = process.ask(4)
    process.settle()
    process.transition(models["b"], Require.B2)
    after = process.ask(4)
    process.settle()
    truth = Truth({weights_root(models[name]): expected_parents(models[name]) for name in ("a", "b")})
    for answer in (before, after):
        law_10_one_identity(answer, truth)
    assert before.tokens != after.tokens


def tensors_of(directory: Path) -> list[str]:
    with Checkpoint.open(directory) as checkpoint:
        return sorted(checkpoint.own_tensors)


def test_no_parameter_is_too_small_to_be_written(process: Process, models: Models, tmp_path: Path) -> None:
    """One row of each tensor, alone: it is written, it alone, and every other byte stays."""
    base = models["a"]
    for number, tensor in enumerate(tensors_of(base)):
        target = change_rows(base, tmp_path / f"one{number}", tensor, [0], negate)
        record = process.record(process.transition(target, Require.B2))
        assert (record.state, record.rows_written) == ("PUBLISHED", 1), tensor
        assert holds(process, target), tensor
        base = target


BATCHES = (
    (hashing, "CHUNK_BYTES"), (hashing, "READ_BYTES"), (stage, "PIECE_BYTES"),
    (images, "SLICE_BYTES"), (images, "READ_BYTES"), (images, "COMPARE_BYTES"), (images, "VIEW_BYTES"),
    (in_place, "READ_BYTES"),
)  # fmt: skip
"""What is read, digested, settled and compared at a time, wherever it is said."""


def test_the_size_of_batches_changes_no_byte(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same plan, 1, 10 and 1000 groups at a time."""
    found, calls = set(), {}
    for groups in (1, 10, 1000):
        for module, name in BATCHES:
            monkeypatch.setattr(module, name, groups * 64 * 1024)
        monkeypatch.setattr(hashing.chunks, "__defaults__", (groups * 64 * 1024,))
        device: list[str] = []
        process = Process(Disk(), Device(), "p", lambda _device, what, _on, told=device: told.append(what) or "")
        process.start(models["a"])
        assert ended(process, process.transition(models["b"], Require.B2)) == "PUBLISHED"
        assert holds(process, models["b"])
        resident = process.owner.view.resident
        assert resident is not None
        found.add((resident.model.identity, process.device.digest()))
        assert ended(process, process.rollback()) == "PUBLISHED"
        assert holds(process, models["a"])
        process.close()
        calls[groups] = device.count("read_rows")
    assert len(found) == 1
    assert calls[1] > calls[10], "they were batches of other sizes"


def test_the_order_and_size_of_pushed_batches_change_no_byte(models: Models) -> None:
    """The rows of ``b``'s embedding, one by one from the end, and all at once: one identity."""
    raw = read_tensor(models["b"], EMBED)
    rows = {row: raw[row * 512 : (row + 1) * 512] for row in range(260)}
    found = set()
    for batch in (1, 10, 1000):
        process = Process(Disk(), Device(), "p").start(models["a"])
        starts = range(0, 260, batch)
        ordered = {row: rows[row] for start in reversed(starts) for row in range(start, min(start + batch, 260))}
        assert ended(process, process.push({EMBED: ordered})) == "PUBLISHED"
        resident = process.owner.view.resident
        assert resident is not None
        found.add((resident.model.identity.weights, process.device.digest()))
        process.close()
    assert len(found) == 1


def test_a_failed_chunk_is_not_forgotten_by_those_that_follow(process: Process) -> None:
    """A push with a bad chunk never becomes a target: nothing of it is published, whatever came after."""
    size = len(read_tensor(process_checkpoint(process), K0)) // 16
    good, bad = {0: bytes(size)}, {99: bytes(size)}
    with pytest.raises(OwnerError) as caught:
        process.push({K0: {**good, **bad}})
    assert caught.value.reason is Reason.ARGUMENT_INVALID
    resident = process.owner.view.resident
    assert resident is not None
    assert resident.generation == 1
    assert process.verify().ok


def process_checkpoint(process: Process) -> Path:
    resident = process.owner.view.resident
    assert resident is not None
    return Path(resident.model.checkpoint)


def test_a_captured_address_stays_the_address(process: Process, models: Models) -> None:
    """A B2 allocates nothing: whoever has captured an allocation still has the resident one."""
    resident = process.owner.view.resident
    assert resident is not None
    captured, counters = dict(resident.runtime.allocations), process.binding.counters.snapshot()
    process.transition(models["b"], Require.B2)
    process.rollback()
    after = process.owner.view.resident
    assert after is not None
    assert after.runtime is resident.runtime
    assert dict(after.runtime.allocations) == captured
    since = process.binding.counters.since(counters)
    assert (since.allocations, since.uploads, since.program_loads, since.compiles) == (0, 0, 0, 0)


@pytest.mark.parametrize("point", [Point.COMMIT_STAGED, Point.COMMIT_INTENT, Point.WRITE_ROWS])
def test_a_checkpoint_rewritten_under_a_transition_changes_nothing_of_it(
    process: Process, models: Models, tmp_path: Path, point: Point
) -> None:
    """What was read and proved is what is published; a restart then says why it cannot be had again."""
    kept = shutil.copytree(models["b"], tmp_path / "kept")

    def rewrite() -> None:
        shutil.copy(models["c"] / "model.safetensors", models["b"] / "model.safetensors")

    once_at(process, point, Moment.BEFORE, rewrite)
    assert ended(process, process.transition(models["b"], Require.B2)) == "PUBLISHED"
    assert holds(process, kept)
    after = Process(process.disk.copy(), process.device.after_process(survives=True, seed=0), "q").start()
    assert after.owner.view.state == "EMPTY"
    assert "does not hold generation 2 any more" in after.owner.view.reason
    after.close()
