"""What is kept when nothing can be proved: the evidence, the buffers, the holds, and the quarantine itself."""

from __future__ import annotations

import gc
import json
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from support.checkpoints import EMBED, NORM, Q0, change_rows, negate, write_tiny
from support.owners import OwnerHarness, running_owner

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.plan import Require
from rowlock.daemon.owner.options import Drain
from rowlock.daemon.owner.states import OwnerState
from rowlock.journal.journal import Journal
from rowlock.journal.journal_file import JournalError
from rowlock.v1.errors import OwnerError, Reason


@pytest.fixture
def target(tiny: Path, tmp_path: Path) -> Path:
    """Rows of three allocations differ."""
    first = change_rows(tiny, tmp_path / "first", EMBED, [5, 200], negate)
    second = change_rows(first, tmp_path / "second", Q0, [1], negate)
    return change_rows(second, tmp_path / "target", NORM, [0], negate)


def storage_of(owner: OwnerHarness):  # type: ignore[no-untyped-def]
    return owner.core.binding.memory._inner


def lost(*_arguments: object) -> None:
    raise DeviceError(DeviceFault.LOST, "injected")


def test_the_mixed_bytes_of_a_partial_restoration_are_on_record_before_the_unload(
    owner: OwnerHarness, target: Path, fault_file: Path
) -> None:
    """Some writes arrive, one does not: what is there is neither the old model nor the new one."""
    memory, left = storage_of(owner), {}
    release = memory.release

    def note(allocation) -> None:  # type: ignore[no-untyped-def]
        left[allocation.parent.name] = blake3(memory._live[allocation.id]._inner._bytes.data).hexdigest()[:16]
        release(allocation)

    memory.release = note
    before = {name: bytes_of(owner, name) for name in owner.core.resident.runtime.allocations}
    fault_file.write_text(json.dumps({"operation": "write", "effect": "flip", "skip": 1, "count": 4}))
    record = owner.transition(target)
    assert (record.state, record.reason) == ("UNLOADED", "VERIFY_MISMATCH")
    told = owner.owner.journal.events(record.id)[-1].message.split("left behind: ")[1]
    on_record = dict(item.split("=") for item in told.split(", "))
    assert on_record == {name: left[name] for name in on_record}
    assert len(on_record) == 3
    old = {name: blake3(data).hexdigest()[:16] for name, data in before.items()}
    assert any(on_record[name] == old[name] for name in on_record), "some of it could be restored"
    assert any(on_record[name] != old[name] for name in on_record), "and some could not"


def bytes_of(owner: OwnerHarness, name: str) -> bytes:
    allocation = owner.core.resident.runtime.allocations[name]
    return bytes(storage_of(owner)._live[allocation.id]._inner._bytes)


def open_files(directory: Path) -> set[str]:
    """Files below a directory that this process has open."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            path = str(entry.readlink())
        except FileNotFoundError:
            continue
        if path.startswith(f"{directory}/"):
            found.add(path)
    return found


def test_after_a_failed_close_everything_is_kept(tiny: Path, tmp_path: Path, target: Path) -> None:
    """Native work may still read and write what it was given: runtime, images, the checkpoint's files."""
    with running_owner(tmp_path / "state", tiny) as owner:
        memory = storage_of(owner)
        live, runtime = set(memory._live), weakref.ref(owner.core.resident.runtime)
        memory.write_rows = memory.release = lost
        record = owner.transition(target)
        gc.collect()
        assert record.state == "QUARANTINED"
        assert set(memory._live) == live
        assert runtime() is not None
        (transit,) = [item for item in owner.core.abandoned if hasattr(item, "expected")]
        assert transit.before
        assert transit.expected
        assert str(target / "model.safetensors") in open_files(target)
        transit.target.close()
    with running_owner(tmp_path / "state", None) as owner:
        assert owner.owner.view.state is OwnerState.QUARANTINED
        assert owner.owner.view.resident is None
        row = owner.owner.journal.find(record.id)
        assert row is not None
        assert row.state == "QUARANTINED"


def test_after_a_call_that_never_came_back_leases_and_pages_are_kept(tiny: Path, tmp_path: Path) -> None:
    """Its step may still read the weights and write the pages: nothing of either is given to anybody else."""
    with running_owner(tmp_path / "state", tiny, call_timeout_s=1.0) as owner:
        runtime, live = owner.core.resident.runtime, set(storage_of(owner)._live)
        running, others = owner.ask("abc", 1500), [owner.ask("xyz", 1500) for _ in range(2)]
        for answer in (running, *others):
            answer.wait_token()
        held = threading.Event()
        inner = runtime._inner
        step, inner.advance = inner.advance, lambda sequences: held.wait(60) and step(sequences)
        for answer in (running, *others):
            with pytest.raises(OwnerError) as caught:
                answer.wait()
            assert caught.value.reason is Reason.QUARANTINED
        for _ in ("while the call hangs", "when it came back, and the thread has ended"):
            assert [lease.generation for lease in owner.owner.view.leases] == [1, 1, 1]
            assert owner.core.scheduler.active == 3
            assert inner.cache.groups[0].in_use >= 3
            assert owner.core.resident.runtime is runtime
            assert set(storage_of(owner)._live) == live
            held.set()
            owner.owner._thread.join(30)


def test_a_good_transition_keeps_nothing_of_itself(owner: OwnerHarness, target: Path) -> None:
    assert owner.transition(target).state == "PUBLISHED"
    assert owner.core.abandoned == []
    assert open_files(target) == set()


def failing_publish(owner: OwnerHarness) -> None:
    def fail(*_arguments: object) -> None:
        raise JournalError("disk full")

    owner.owner.journal.publish = fail  # type: ignore[method-assign]


def planted_drift(owner: OwnerHarness) -> None:
    allocation = owner.core.resident.runtime.allocations["embed"]
    storage_of(owner).tensor(allocation).view(-1)[3] += 1


def bad_write(owner: OwnerHarness) -> None:
    (owner.state.parent / "fault.json").write_text(json.dumps({"operation": "write", "effect": "flip"}))


def nothing(_owner: OwnerHarness) -> None:
    """No trouble."""


WAYS_OUT: dict[str, tuple[Callable[[OwnerHarness], None], Require, dict[str, object], str]] = {
    "published in place": (nothing, Require.B2, {}, "PUBLISHED"),
    "published by a reload": (nothing, Require.B1, {}, "PUBLISHED"),
    "a write that went wrong": (bad_write, Require.B2, {}, "ROLLED_BACK"),
    "a load that went wrong": (bad_write, Require.B1, {}, "ROLLED_BACK"),
    "drift found before": (planted_drift, Require.B2, {}, "FAILED"),
    "a publish that failed": (failing_publish, Require.B2, {}, "ROLLED_BACK"),
    "a publish of a reload that failed": (failing_publish, Require.B1, {}, "ROLLED_BACK"),
    "a drain past its deadline": (
        nothing, Require.B2, {"drain": Drain.DEADLINE, "drain_deadline_s": 0.001}, "CANCELLED",
    ),
    "a drain that cancels": (nothing, Require.B2, {"drain": Drain.CANCEL}, "PUBLISHED"),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS_OUT)
def test_every_way_out_lets_requests_go_on(owner: OwnerHarness, target: Path, name: str) -> None:
    """One runs when the transition begins, one is asked for meanwhile, one afterwards."""
    trouble, require, options, outcome = WAYS_OUT[name]
    trouble(owner)
    tokens = 1500 if options else 300
    running = owner.ask("abc", tokens)
    running.wait_token()
    transition = owner.begin(target, require, **options)
    meanwhile = owner.ask("abc", 5)
    assert owner.end_of(transition).state == outcome
    assert owner.core.scheduler.admitting
    assert not owner.core.writing
    assert len(owner.ask("abc", 5).wait()) == 5
    if options.get("drain") is Drain.CANCEL:
        with pytest.raises(OwnerError) as caught:
            running.wait()
        assert caught.value.reason is Reason.DRAINED
    else:
        assert len(running.wait()) == tokens
        assert len(meanwhile.wait()) == 5


def test_a_way_out_without_a_model_answers_those_who_wait(owner: OwnerHarness, target: Path) -> None:
    """UNLOADED: who waited is told at once, and the next load serves again."""
    running = owner.ask("abc", 1500)
    running.wait_token()
    fault = owner.state.parent / "fault.json"
    fault.write_text(json.dumps({"operation": "write", "effect": "flip", "count": 10**6}))
    transition = owner.begin(target)
    while owner.core.scheduler.admitting:
        running.wait_token()
    meanwhile = owner.ask("abc", 5)
    assert owner.end_of(transition).state == "UNLOADED"
    with pytest.raises(OwnerError) as caught:
        meanwhile.wait()
    assert caught.value.reason is Reason.EMPTY
    fault.unlink()
    assert owner.transition(target).state == "PUBLISHED"
    assert len(owner.ask("abc", 5).wait()) == 5


def test_other_programs_are_loaded_only_by_a_process_after_the_release(tiny: Path, tmp_path: Path) -> None:
    """Release takes the responsibility and ends the process; recorded, signed, with who and why."""
    with running_owner(tmp_path / "state", tiny) as owner:
        memory = storage_of(owner)
        memory.release = lost
        other = write_tiny(tmp_path / "other", seed=1, num_hidden_layers=3)
        assert owner.transition(other).state == "QUARANTINED"
        owner.owner.release_quarantine("alice", "the card was replaced")
        with pytest.raises(OwnerError) as caught:
            owner.transition(other)
        assert caught.value.reason is Reason.QUARANTINED
    journal = Journal(tmp_path / "state", "cpu")
    released = [item.event for item in journal.chain_page(0).events if item.event.state == "RELEASED"]
    assert [(event.message, len(event.signature)) for event in released] == [("by alice: the card was replaced", 64)]
    journal.close()
    with running_owner(tmp_path / "state", None) as owner:
        assert owner.transition(other).state == "PUBLISHED"
