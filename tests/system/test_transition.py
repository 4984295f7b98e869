"""Transitions on a whole owner in this process: the real thread, journal, files and storage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import (
    EMBED,
    K0,
    NORM,
    Q0,
    TINY,
    change_rows,
    copy,
    negate,
    random_tensors,
    read_tensor,
    write_tiny,
    write_weights,
)
from support.devices import device_of_owners
from support.owners import OwnerHarness, running_owner

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.plan import Require
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.states import OwnerState
from rowlock.v1.errors import OwnerError, Reason


def resident_bytes(owner: OwnerHarness) -> dict[str, bytes]:
    """Every tensor as the device holds it, by way of the programs' own tensors."""
    resident = owner.owner.view.resident
    assert resident is not None
    found = {}
    for name, item in resident.model.layout.placements.items():
        allocation = resident.runtime.allocations[item.parent]
        whole = np.empty(allocation.parent.nbytes, np.uint8)
        owner.core.binding.memory.read_rows(allocation, 0, whole)
        found[name] = whole[item.offset : item.offset + item.tensor.nbytes].tobytes()
    return found


def checkpoint_bytes(directory: Path, owner: OwnerHarness) -> dict[str, bytes]:
    return {name: read_tensor(directory, name) for name in resident_bytes(owner)}


@pytest.fixture
def target(tiny: Path, tmp_path: Path) -> Path:
    return change_rows(tiny, tmp_path / "target", EMBED, [5, 6, 200], negate)


def storage_of(owner: OwnerHarness):  # type: ignore[no-untyped-def]
    """The CPU binding's memory, behind the watchdog."""
    return owner.core.binding.memory._inner


def arm(fault_file: Path, **fault: object) -> None:
    fault_file.write_text(json.dumps(fault))


def test_the_first_load_is_generation_one(owner: OwnerHarness, tiny: Path) -> None:
    view = owner.owner.view
    assert view.state is OwnerState.READY
    assert view.resident is not None
    assert view.resident.generation == 1
    assert resident_bytes(owner) == checkpoint_bytes(tiny, owner)
    assert owner.verify().ok


def test_the_owner_thread_is_given_what_a_record_says_of_a_plan(owner: OwnerHarness, target: Path) -> None:
    plan, opened = owner.owner.planner.transition(owner.owner.view.resident, target, Require.AUTO, Options())
    opened.close()
    assert "summary" in vars(plan), "it would be made by the owner thread"


def test_b2_writes_exactly_the_rows_that_differ(owner: OwnerHarness, target: Path) -> None:
    allocations = dict(owner.owner.view.resident.runtime.allocations)  # type: ignore[union-attr]
    before = owner.core.binding.counters.snapshot()
    record = owner.transition(target)
    assert (record.state, record.level, record.generation) == ("PUBLISHED", "B2", 2)
    assert (record.rows_written, record.bytes_written) == (3, 3 * 128)
    assert [(item.parent, item.first_row, item.rows) for item in owner.writes(record)] == [
        ("embed", 5, 2),
        ("embed", 200, 1),
    ]
    assert resident_bytes(owner) == checkpoint_bytes(target, owner)
    change = owner.core.binding.counters.since(before)
    assert change.bytes_written == 3 * 128
    assert (change.uploads, change.program_loads, change.compiles, change.allocations) == (0, 0, 0, 0)
    assert dict(owner.owner.view.resident.runtime.allocations) == allocations  # type: ignore[union-attr]
    assert {item.allocation for item in owner.writes(record)} == {allocations["embed"].id}
    assert owner.verify().ok


@pytest.mark.parametrize("tensor", [EMBED, Q0, K0, NORM, "model.layers.1.mlp.up_proj.weight"])
def test_after_a_b2_answers_are_those_of_a_fresh_load(
    owner: OwnerHarness, tiny: Path, tmp_path: Path, tensor: str
) -> None:
    row = 0 if tensor == NORM else 3
    target = change_rows(tiny, tmp_path / "t", tensor, [row], negate)
    old = owner.tokens("once upon a time")
    assert owner.transition(target, Require.B2).rows_written == 1
    with running_owner(tmp_path / "fresh-state", target) as fresh:
        assert owner.identity == fresh.identity
        assert owner.tokens("once upon a time") == fresh.tokens("once upon a time")
    assert owner.rollback().state == "PUBLISHED"
    assert owner.tokens("once upon a time") == old


def test_the_same_target_again_is_a_noop(owner: OwnerHarness, target: Path) -> None:
    owner.transition(target)
    record = owner.transition(target)
    assert (record.state, record.level, record.generation, record.rows_written) == ("NOOP", "NOOP", 0, 0)
    assert owner.owner.view.resident.generation == 2  # type: ignore[union-attr]


def test_only_the_tokenizer_changed(owner: OwnerHarness, tiny: Path, tmp_path: Path) -> None:
    target = copy(tiny, tmp_path / "t")
    content = json.loads((target / "tokenizer.json").read_text())
    content["decoder"] = {"type": "ByteFallback"}
    (target / "tokenizer.json").write_text(json.dumps(content))
    before = owner.identity
    record = owner.transition(target)
    assert (record.state, record.level, record.rows_written) == ("PUBLISHED", "B2", 0)
    assert (owner.identity.weights, owner.identity.program) == (before.weights, before.program)
    assert owner.identity.assets != before.assets
    assert owner.owner.view.resident.text.digest == owner.identity.assets  # type: ignore[union-attr]
    assert owner.rollback().state == "PUBLISHED"
    assert owner.identity == before


def test_rollback_needs_no_checkpoint_and_undoes_itself(owner: OwnerHarness, tiny: Path, tmp_path: Path) -> None:
    base = copy(tiny, tmp_path / "base")
    owner.transition(base)
    target = change_rows(base, tmp_path / "t", EMBED, [1], negate)
    first = owner.identity
    owner.transition(target)
    second = owner.identity
    for directory in (base, target):
        (directory / "model.safetensors").unlink()
    back = owner.rollback()
    assert (back.state, back.kind, back.level, back.rows_written) == ("PUBLISHED", "rollback", "B2", 1)
    assert owner.identity == first
    assert owner.verify().ok
    assert owner.rollback().state == "PUBLISHED"
    assert owner.identity == second


def test_the_first_generation_cannot_be_rolled_back(owner: OwnerHarness) -> None:
    with pytest.raises(OwnerError) as caught:
        owner.rollback()
    assert caught.value.reason is Reason.ROLLBACK_UNAVAILABLE


def test_b1_closes_the_old_runtime_first(owner: OwnerHarness, target: Path) -> None:
    live: list[int] = []
    memory = storage_of(owner)
    allocate = memory.allocate
    memory.allocate = lambda parent: (live.append(len(memory._live)), allocate(parent))[1]
    record = owner.transition(target, Require.B1)
    assert (record.state, record.level) == ("PUBLISHED", "B1")
    assert live[0] == 0, "the new runtime was created while the old one was live"
    assert resident_bytes(owner) == checkpoint_bytes(target, owner)
    assert record.counters["uploads"] == record.counters["allocations"] == len(memory._live)
    assert owner.rollback().state == "PUBLISHED"


def test_another_program_is_reloaded_and_can_be_rolled_back(owner: OwnerHarness, tiny: Path, tmp_path: Path) -> None:
    first, answer = owner.identity, owner.tokens()
    target = write_tiny(tmp_path / "deeper", seed=3, num_hidden_layers=3)
    record = owner.transition(target)
    assert (record.state, record.level) == ("PUBLISHED", "B1")
    assert resident_bytes(owner) == checkpoint_bytes(target, owner)
    assert owner.rollback().level == "B1"
    assert owner.identity == first
    assert owner.tokens() == answer


def test_a_refused_b2_is_never_a_reload(owner: OwnerHarness, tmp_path: Path) -> None:
    with pytest.raises(OwnerError) as caught:
        owner.transition(write_tiny(tmp_path / "deeper", num_hidden_layers=3), Require.B2)
    assert caught.value.reason is Reason.PLAN_REFUSED
    assert owner.owner.view.resident.generation == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("effect", ["flip", "torn", "error"])
def test_a_bad_write_is_undone(owner: OwnerHarness, target: Path, fault_file: Path, effect: str) -> None:
    before, answer, identity = resident_bytes(owner), owner.tokens(), owner.identity
    count = device_of_owners().write_attempts if effect == "error" else 1
    arm(fault_file, operation="write", effect=effect, count=count)
    record = owner.transition(target)
    assert record.state == "ROLLED_BACK"
    assert record.reason == ("DEVICE_FAILED" if effect == "error" else "VERIFY_MISMATCH")
    assert not fault_file.exists()
    assert resident_bytes(owner) == before
    assert owner.identity == identity
    assert owner.tokens() == answer
    assert owner.verify().ok
    assert owner.transition(target).state == "PUBLISHED", "the owner goes on as before"


def test_a_lying_readback_is_undone(owner: OwnerHarness, target: Path, fault_file: Path) -> None:
    """The undo read passes (one slice), the verifying read is hit."""
    arm(fault_file, operation="read", effect="flip", skip=1, bit=9)
    record = owner.transition(target)
    assert (record.state, record.reason) == ("ROLLED_BACK", "VERIFY_MISMATCH")
    assert owner.verify().ok


def test_a_write_that_hits_a_neighbour_is_caught_and_repaired(owner: OwnerHarness, target: Path) -> None:
    """The verify reads whole parents, and the undo holds whole groups."""
    before = resident_bytes(owner)
    memory = storage_of(owner)
    write = memory.write_rows

    def wide(allocation, first_row, data):  # type: ignore[no-untyped-def]
        write(allocation, first_row, data)
        memory.write_rows = write
        write(allocation, first_row + 50, data)

    memory.write_rows = wide
    record = owner.transition(target)
    assert (record.state, record.reason) == ("ROLLED_BACK", "VERIFY_MISMATCH")
    assert resident_bytes(owner) == before


def test_bytes_that_cannot_be_restored_unload_the_model(
    owner: OwnerHarness, target: Path, fault_file: Path, tmp_path: Path
) -> None:
    arm(fault_file, operation="write", effect="flip", count=1000)
    record = owner.transition(target)
    assert (record.state, record.reason) == ("UNLOADED", "VERIFY_MISMATCH")
    view = owner.owner.view
    assert (view.state, view.resident) == (OwnerState.EMPTY, None)
    assert "could not be restored" in view.reason
    assert not storage_of(owner)._live, "the runtime is closed"
    events = owner.owner.journal.events(record.id)
    assert "left behind: embed=" in events[-1].message
    with pytest.raises(OwnerError) as caught:
        owner.tokens()
    assert caught.value.reason is Reason.EMPTY
    fault_file.unlink()
    assert owner.transition(target).state == "PUBLISHED", "from EMPTY a transition is a B1"


def test_a_model_that_cannot_be_closed_is_quarantined(owner: OwnerHarness, target: Path) -> None:
    memory = storage_of(owner)

    def corrupt(*_args: object) -> None:
        raise_device_error()

    memory.write_rows = corrupt
    memory.release = corrupt
    record = owner.transition(target)
    assert record.state == "QUARANTINED"
    assert owner.owner.view.state is OwnerState.QUARANTINED
    for use in (owner.tokens, lambda: owner.transition(target), owner.verify):
        with pytest.raises(OwnerError) as caught:
            use()
        assert caught.value.reason is Reason.QUARANTINED


def raise_device_error() -> None:
    raise DeviceError(DeviceFault.LOST, "injected")


def test_a_failed_reload_loads_the_old_identity_again(owner: OwnerHarness, target: Path, fault_file: Path) -> None:
    identity, answer = owner.identity, owner.tokens()
    arm(fault_file, operation="write", effect="flip", skip=4)
    record = owner.transition(target, Require.B1)
    assert (record.state, record.reason) == ("ROLLED_BACK", "VERIFY_MISMATCH")
    assert owner.identity == identity
    assert owner.tokens() == answer
    assert owner.verify().ok


def test_a_failed_reload_of_both_leaves_the_owner_empty(owner: OwnerHarness, target: Path, fault_file: Path) -> None:
    arm(fault_file, operation="write", effect="flip", count=10**6)
    record = owner.transition(target, Require.B1)
    assert record.state == "UNLOADED"
    assert owner.owner.view.state is OwnerState.EMPTY
    assert not storage_of(owner)._live


def test_a_reload_is_refused_when_the_old_identity_could_not_be_rebuilt(
    owner: OwnerHarness, tiny: Path, tmp_path: Path, target: Path
) -> None:
    base = change_rows(tiny, tmp_path / "base", EMBED, [9], negate)
    owner.transition(base)
    (base / "model.safetensors").unlink()
    identity = owner.identity
    record = owner.transition(target, Require.B1)
    assert (record.state, record.reason) == ("FAILED", "IRREVERSIBLE")
    assert owner.identity == identity
    assert owner.transition(target, Require.B1, allow_irreversible=True).state == "PUBLISHED"


def test_drift_is_refused_and_named(owner: OwnerHarness, target: Path) -> None:
    owner.stray_write("embed", 77)
    record = owner.transition(target)
    assert (record.state, record.reason) == ("FAILED", "DRIFT")
    assert EMBED in record.message
    found = owner.verify()
    assert not found.ok
    assert [tensor for tensor, _, _ in found.drift] == [EMBED]
    assert found.drift[0][1] <= 77 < found.drift[0][1] + found.drift[0][2]


@pytest.mark.parametrize("tensor", [EMBED, NORM], ids=["changed group", "unchanged group"])
def test_a_byte_flipped_under_a_cached_manifest_is_refused(
    owner: OwnerHarness, tiny: Path, tmp_path: Path, tensor: str
) -> None:
    target = change_rows(tiny, tmp_path / "target", EMBED, [2], negate)
    row = 2 if tensor == EMBED else 0
    tampered = change_rows(target, tmp_path / "tampered", tensor, [row], lambda old: bytes([old[0] ^ 1]) + old[1:])
    cache, before = owner.core.stores.cache(), owner.identity
    with Checkpoint.open(target) as good, Checkpoint.open(tampered) as bad:
        manifest = owner.core.loader.hasher.manifest(good, {})
        cache.store(bad, manifest)
    record = owner.transition(tampered)
    assert (record.state, record.reason) == ("FAILED", "TARGET_CHANGED")
    assert tensor in record.message
    assert owner.identity == before
    assert owner.verify().ok


def test_sharded_and_single_file_targets_are_the_same_identity(owner: OwnerHarness, tiny: Path, tmp_path: Path) -> None:
    target = copy(tiny, tmp_path / "sharded")
    (target / "model.safetensors").unlink()
    tensors = random_tensors(TINY, seed=0)
    weight_map = {}
    for index, info in enumerate(tensors):
        name = f"model-{index % 3}.safetensors"
        weight_map[info.name] = name
    for name in set(weight_map.values()):
        write_weights(target, {k: v for k, v in tensors.items() if weight_map[k.name] == name}, name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert owner.transition(target).state == "NOOP"


def test_float32_models_work_and_dtypes_do_not_mix_silently(owner: OwnerHarness, tmp_path: Path) -> None:
    wide = write_tiny(tmp_path / "wide", dtype="F32")
    record = owner.transition(wide)
    assert (record.state, record.level) == ("PUBLISHED", "B1")
    assert resident_bytes(owner) == checkpoint_bytes(wide, owner)
    changed = change_rows(wide, tmp_path / "changed", EMBED, [3], lambda row: row[::-1])
    assert owner.transition(changed).rows_written == 1
