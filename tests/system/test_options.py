"""How a transition is carried out: what is read back, how requests give way, what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import EMBED, K0, NORM, Q0, change_rows, copy, negate, write_tiny
from support.owners import OwnerHarness, running_owner

from rowlock.bindings.plan import Require, TargetCheck, Verify
from rowlock.bindings.planner import Policy
from rowlock.daemon.owner.admission import Admission
from rowlock.daemon.owner.options import Drain, Options
from rowlock.daemon.owner.states import OwnerState
from rowlock.v1.errors import OwnerError, Reason

NAN_ROW = np.full(64, 0x7FC0, np.uint16).tobytes()
PARENT_BYTES = 260 * 64 * 2


@pytest.fixture
def target(tiny: Path, tmp_path: Path) -> Path:
    return change_rows(tiny, tmp_path / "target", EMBED, [5, 200], negate)


@pytest.mark.parametrize("verify", Verify)
@pytest.mark.parametrize("by_digest", [False, True])
def test_every_way_to_verify_publishes_and_rolls_back(
    tiny: Path, tmp_path: Path, target: Path, fault_file: Path, verify: Verify, by_digest: bool
) -> None:
    policy = Policy(image_bytes_max=0 if by_digest else 1 << 30)
    with running_owner(tmp_path / "state", tiny, fault_file, policy=policy) as owner:
        total = owner.owner.view.resident.model.layout.nbytes  # type: ignore[union-attr]
        record = owner.transition(target, verify=verify)
        assert (record.state, record.rows_written, record.verify) == ("PUBLISHED", 2, verify.value)
        assert record.plan["by_digest"] is by_digest
        # the embedding is one group, so reading its groups is reading all of it
        expected = PARENT_BYTES if verify is not Verify.ALL else total
        extra = PARENT_BYTES if by_digest else 0
        assert record.bytes_read_back == PARENT_BYTES + extra + expected
        assert owner.verify().ok
        fault_file.write_text(json.dumps({"operation": "write", "effect": "flip", "bit": 70}))
        before = owner.tokens()
        back = owner.rollback(verify=verify)
        assert (back.state, back.reason) == ("ROLLED_BACK", "VERIFY_MISMATCH")
        assert owner.tokens() == before
        assert owner.verify().ok
        assert owner.rollback(verify=verify).state == "PUBLISHED"
        assert owner.verify().ok


def test_groups_leaves_a_neighbour_unread_and_a_scrub_finds_it(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "wide", vocab_size=2000)  # the embedding has four groups
    target = change_rows(base, tmp_path / "target", EMBED, [3], negate)
    with running_owner(tmp_path / "state", base) as owner:
        memory = owner.core.binding.memory._inner
        write = memory.write_rows

        def stray(allocation, first_row, data):  # type: ignore[no-untyped-def]
            write(allocation, first_row, data)
            write(allocation, first_row + 1500, data)
            memory.write_rows = write

        memory.write_rows = stray
        record = owner.transition(target, verify=Verify.GROUPS)
        assert record.state == "PUBLISHED"
        assert record.unread_bytes == 3 * 512 * 128 - (4 * 512 - 2000) * 128
        while not (scrub := owner.record(record.id).scrub):
            with contextlib.suppress(OwnerError):
                owner.tokens("a", 1)
        assert scrub.startswith(f"drift: {EMBED}")
        newest = owner.record(owner.owner.journal.transitions(1)[0].id)
        assert (newest.kind, newest.state, newest.rows_written) == ("repair", "PUBLISHED", 1)
        assert owner.owner.view.state is OwnerState.READY
        assert owner.verify().ok
        assert owner.transition(base).state == "PUBLISHED"


def test_all_finds_what_lies_outside_the_touched_parents(owner: OwnerHarness, target: Path) -> None:
    owner.stray_write("norm", 0)
    assert owner.transition(target, verify=Verify.PARENTS).state == "PUBLISHED"
    record = owner.rollback(verify=Verify.ALL)
    assert (record.state, record.reason) == ("UNLOADED", "VERIFY_MISMATCH"), "the old bytes are not all there either"
    assert NORM in record.message
    assert owner.owner.view.state == "EMPTY"


def test_staged_check_believes_the_manifest_for_the_rest(owner: OwnerHarness, tiny: Path, tmp_path: Path) -> None:
    """What `target_check = staged` gives up, and that the record says so."""
    target = change_rows(tiny, tmp_path / "target", EMBED, [2], negate)
    opened = owner.owner.planner.loader.open(target)
    tampered = change_rows(target, tmp_path / "tampered", NORM, [0], lambda old: bytes([old[0] ^ 1]) + old[1:])
    bad = owner.owner.planner.loader.open(tampered)
    owner.core.stores.cache().store(bad.source, opened.model.manifest)
    opened.close()
    bad.close()
    assert owner.transition(tampered, target_check=TargetCheck.WHOLE).reason == "TARGET_CHANGED"
    record = owner.transition(tampered, target_check=TargetCheck.STAGED)
    assert (record.state, record.target_check) == ("PUBLISHED", "STAGED")
    assert owner.verify().ok


@pytest.mark.parametrize("require", [Require.B2, Require.B1])
def test_new_nan_rows_are_refused_unless_allowed(
    owner: OwnerHarness, tiny: Path, tmp_path: Path, require: Require
) -> None:
    before, answer = owner.identity, owner.tokens()
    target = change_rows(tiny, tmp_path / "nan", Q0, [1, 2], lambda _: NAN_ROW)
    record = owner.transition(target, require)
    assert (record.state, record.reason) == ("FAILED", "NONFINITE")
    assert "128 values" in record.message
    assert (owner.identity, owner.tokens()) == (before, answer)
    assert owner.transition(target, require, allow_nonfinite=True).state == "PUBLISHED"
    with pytest.raises(OwnerError) as caught:
        owner.tokens()
    assert caught.value.reason is Reason.DEVICE_FAILED, "garbage is not served"
    assert owner.rollback(allow_nonfinite=True).state == "PUBLISHED"
    assert owner.tokens() == answer, "no K/V kept the NaN"


def test_drain_deadline_cancels_with_nothing_written(owner: OwnerHarness, target: Path) -> None:
    running = owner.ask("abc", 1900)
    running.wait_token()
    record = owner.transition(target, drain=Drain.DEADLINE, drain_deadline_s=0.05)
    assert (record.state, record.reason, record.rows_written) == ("CANCELLED", "CANCELLED", 0)
    assert record.generation == 2, "its generation was taken and is never used again"
    assert len(running.wait()) == 1900
    assert owner.transition(target).generation == 3


def test_drain_cancel_ends_what_runs(owner: OwnerHarness, target: Path) -> None:
    running = owner.ask("abc", 1900)
    running.wait_token()
    assert owner.transition(target, drain=Drain.CANCEL).state == "PUBLISHED"
    with pytest.raises(OwnerError) as caught:
        running.wait()
    assert caught.value.reason is Reason.DRAINED


def test_cancel_until_the_first_write(owner: OwnerHarness, target: Path) -> None:
    identity = owner.identity
    running = owner.ask("abc", 1500)
    running.wait_token()
    transition = owner.begin(target)
    owner.owner.cancel(transition).result(30)
    record = owner.end_of(transition)
    assert (record.state, record.rows_written) == ("CANCELLED", 0)
    assert owner.identity == identity
    with pytest.raises(OwnerError) as caught:
        owner.owner.cancel(transition).result(30)
    assert caught.value.reason is Reason.NOT_CANCELLABLE
    assert len(running.wait()) == 1500
    assert not owner.core.stores.undo.owners(), "nothing is left of it"
    assert owner.transition(target).state == "PUBLISHED"


def test_unload_and_load_again(owner: OwnerHarness, tiny: Path) -> None:
    answer = owner.tokens()
    record = owner.unload()
    assert (record.state, record.kind, record.to_identity) == ("UNLOADED", "unload", None)
    assert owner.owner.view.state is OwnerState.EMPTY
    assert not owner.core.binding.memory._inner._live
    for use in (owner.tokens, owner.unload, owner.verify):
        with pytest.raises(OwnerError) as caught:
            use()
        assert caught.value.reason is Reason.EMPTY
    again = owner.transition(tiny)
    assert (again.state, again.level) == ("PUBLISHED", "B1")
    assert owner.tokens() == answer


def test_rollback_to_an_earlier_generation_composes_undos(owner: OwnerHarness, tiny: Path, tmp_path: Path) -> None:
    first, answer = owner.identity, owner.tokens()
    second = change_rows(tiny, tmp_path / "second", EMBED, [1, 2], negate)
    third = change_rows(second, tmp_path / "third", K0, [3], negate)
    fourth = change_rows(third, tmp_path / "fourth", EMBED, [2, 100], lambda row: row[::-1])
    identities = {1: first}
    for number, directory in enumerate((second, third, fourth), start=2):
        assert owner.transition(directory).generation == number
        identities[number] = owner.identity
    for directory in (second, third, fourth):
        (directory / "model.safetensors").unlink()
    record = owner.rollback(to=1)
    assert (record.state, record.level, record.rows_written) == ("PUBLISHED", "B2", 4)
    assert (owner.identity, owner.tokens()) == (first, answer)
    assert owner.verify().ok
    for number in (3, 4, 2):
        assert owner.rollback(to=number).state == "PUBLISHED"
        assert owner.identity == identities[number]
        assert owner.verify().ok
    with pytest.raises(OwnerError) as caught:
        owner.rollback(to=99)
    assert caught.value.reason is Reason.ROLLBACK_UNAVAILABLE


def test_rollback_across_a_reload_reads_the_held_checkpoint(owner: OwnerHarness, tiny: Path, tmp_path: Path) -> None:
    first = owner.identity
    owner.transition(change_rows(tiny, tmp_path / "second", EMBED, [1], negate))
    owner.transition(change_rows(tiny, tmp_path / "third", EMBED, [2], negate), Require.B1)
    record = owner.rollback(to=1)
    assert record.state == "PUBLISHED"
    assert owner.identity == first


def test_a_large_undo_stays_in_memory_and_rollback_reads_the_checkpoint(
    tiny: Path, tmp_path: Path, target: Path, fault_file: Path
) -> None:
    base = copy(tiny, tmp_path / "base")
    with running_owner(tmp_path / "state", base, fault_file, policy=Policy(undo_durable_max=10)) as owner:
        first = owner.identity
        record = owner.transition(target)
        assert (record.state, record.undo) == ("PUBLISHED", "MEMORY")
        assert not owner.core.stores.undo.owners()
        fault_file.write_text(json.dumps({"operation": "write", "effect": "torn"}))
        assert owner.rollback().state == "ROLLED_BACK", "restoration writes from memory"
        assert owner.rollback().state == "PUBLISHED"
        assert owner.identity == first
        owner.transition(target)
        (base / "model.safetensors").unlink()
        with pytest.raises(OwnerError) as caught:
            owner.rollback()
        assert caught.value.reason in {Reason.ROLLBACK_UNAVAILABLE, Reason.TARGET_NOT_FOUND, Reason.TARGET_CHANGED}
        assert owner.verify().ok


def test_a_failed_reload_can_be_told_not_to_load_the_old_identity(
    owner: OwnerHarness, target: Path, fault_file: Path
) -> None:
    fault_file.write_text(json.dumps({"operation": "write", "effect": "flip"}))
    record = owner.transition(target, Require.B1, reload_old=False)
    assert record.state == "UNLOADED"
    assert "by policy" in owner.owner.view.reason


def test_an_etag_is_a_precondition(owner: OwnerHarness, target: Path, tiny: Path) -> None:
    def admit(etag: str, directory: Path) -> str:
        plan, opened = owner.owner.planner.transition(owner.owner.view.resident, directory, Require.AUTO, Options())
        return owner.owner.admit(Admission("transition", plan, opened, Options(), etag=etag)).result(30)

    stale = owner.owner.view.etag
    assert owner.end_of(admit(stale, target)).state == "PUBLISHED"
    assert owner.owner.view.etag != stale
    with pytest.raises(OwnerError) as caught:
        admit(stale, tiny)
    assert caught.value.reason is Reason.ETAG_STALE
    assert owner.end_of(admit(owner.owner.view.etag, tiny)).state == "PUBLISHED"


def test_undo_files_of_old_generations_and_of_failures_are_swept(
    owner: OwnerHarness, tiny: Path, target: Path, fault_file: Path
) -> None:
    for index in range(12):
        assert owner.transition((target, tiny)[index % 2]).state == "PUBLISHED"
    assert len(owner.core.stores.undo.owners()) == 8
    fault_file.write_text(json.dumps({"operation": "write", "effect": "flip"}))
    failed = owner.transition(target)
    assert failed.state == "ROLLED_BACK"
    assert failed.id not in owner.core.stores.undo.owners()
    assert owner.rollback().state == "PUBLISHED"


def test_record_keeps_its_plan(owner: OwnerHarness, target: Path) -> None:
    record = owner.transition(target)
    assert record.plan["digest"]
    assert dataclasses.asdict(record)["plan"]["changes"][0]["tensor"] == EMBED


def test_after_a_rollback_the_checkpoint_still_counts_as_held(owner: OwnerHarness, target: Path) -> None:
    owner.transition(target)
    owner.rollback()
    deeper = write_tiny(target.parent / "deeper", num_hidden_layers=3)
    plan, opened = owner.owner.planner.transition(owner.owner.view.resident, deeper, Require.AUTO, Options())
    opened.close()
    assert not plan.irreversible


def test_a_reload_holds_the_old_checkpoint_until_it_has_ended(
    owner: OwnerHarness, tiny: Path, tmp_path: Path, target: Path, fault_file: Path
) -> None:
    base = copy(tiny, tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 5}')
    owner.transition(base)
    identity = owner.identity
    running = owner.ask("abc", 1200)
    running.wait_token()
    transition = owner.begin(target, Require.B1)
    while owner.owner.journal.find(transition).state != "JOURNALED":  # type: ignore[union-attr]
        pass
    shutil.rmtree(base)
    fault_file.write_text(json.dumps({"operation": "write", "effect": "flip"}))
    record = owner.end_of(transition)
    assert (record.state, owner.identity) == ("ROLLED_BACK", identity)
    assert owner.verify().ok
