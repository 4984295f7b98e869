"""Found by trying to break it: each of these once killed the owner, or served what it should not."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.checkpoints import EMBED, TINY, change_rows, copy, negate, random_tensors, write_tiny, write_weights
from support.owners import Answer, OwnerHarness, running_owner

from rowlock.bindings.checkpoint import directory as module
from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.header import build_header
from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.bindings.device import DeviceError, DeviceFault, Sampling
from rowlock.bindings.plan import Require
from rowlock.daemon.owner.admission import Admission
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.requests import GenerationRequest
from rowlock.daemon.owner.states import OwnerState
from rowlock.journal.journal import Journal
from rowlock.journal.journal_file import CommitUnknownError, JournalError
from rowlock.v1.errors import OwnerError, Reason


@pytest.fixture
def target(tiny: Path, tmp_path: Path) -> Path:
    return change_rows(tiny, tmp_path / "target", EMBED, [5], negate)


def retie(directory: Path, tied: bool) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": tied}))


def test_a_cached_manifest_is_not_believed_for_other_tensors(owner: OwnerHarness, tmp_path: Path) -> None:
    """The cache is bound to the weight files; the config that decides on the head is another file."""
    directory = write_tiny(tmp_path / "head")
    tensors = random_tensors(TINY, seed=0)
    embed = next(info for info in tensors if info.name == EMBED)
    write_weights(directory, {**tensors, TensorInfo("lm_head.weight", "BF16", embed.shape): tensors[embed]})
    tied = owner.transition(directory)
    assert tied.state == "NOOP"
    retie(directory, False)
    untied = owner.transition(directory)
    assert (untied.state, untied.level) == ("PUBLISHED", "B1")
    assert "head" in owner.owner.view.resident.model.layout.parents  # type: ignore[union-attr]
    assert owner.verify().ok
    retie(directory, True)
    tied_again = owner.transition(directory, allow_irreversible=True)
    assert tied_again.state == "PUBLISHED"
    assert owner.verify().ok


def test_header_and_bytes_are_of_one_file_whatever_happens_to_the_path(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = copy(tiny, tmp_path / "raced")
    other = copy(tiny, tmp_path / "other")
    write_weights(other, dict(reversed(list(random_tensors(TINY, seed=0).items()))))
    read_header = module.read_header

    def racing(file):  # type: ignore[no-untyped-def]
        (other / "model.safetensors").rename(directory / "model.safetensors")
        return read_header(file)

    monkeypatch.setattr(module, "read_header", racing)
    with running_owner(tmp_path / "state", directory) as owner:
        monkeypatch.undo()
        resident = owner.identity
        assert owner.verify().ok
        assert owner.transition(tiny).state == "NOOP", "the file that was opened is what was digested"
        assert owner.transition(directory).state == "NOOP"
        assert owner.identity == resident


def test_stop_tokens_belong_to_the_assets(owner: OwnerHarness, tiny: Path, tmp_path: Path) -> None:
    target = copy(tiny, tmp_path / "stops")
    (target / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert owner.transition(target).rows_written == 0
    assert owner.owner.view.resident.text.eos_tokens == (7,)  # type: ignore[union-attr]
    owner.rollback()
    assert owner.owner.view.resident.text.eos_tokens == (256,)  # type: ignore[union-attr]


def test_stop_tokens_survive_a_checkpoint_edited_before_a_restart(tiny: Path, tmp_path: Path) -> None:
    base = copy(tiny, tmp_path / "base")
    with running_owner(tmp_path / "state", base):
        pass
    (base / "generation_config.json").write_text('{"eos_token_id": 7}')
    with running_owner(tmp_path / "state", None) as owner:
        assert owner.owner.view.resident.text.eos_tokens == (256,)  # type: ignore[union-attr]


def test_a_caller_that_stops_listening_does_not_stop_the_owner(owner: OwnerHarness, target: Path) -> None:
    assert not owner.owner.verify().cancel()
    plan, opened = owner.owner.planner.transition(owner.owner.view.resident, target, Require.AUTO, Options())
    future = owner.owner.admit(Admission("transition", plan, opened, Options()))
    assert not future.cancel()
    assert owner.end_of(future.result(30)).state == "PUBLISHED"


@pytest.mark.parametrize("temperature", [1e-40, 1e-5, 1e5])
def test_any_temperature_samples(owner: OwnerHarness, temperature: float) -> None:
    assert len(owner.ask("abc", 5, sampling=Sampling(temperature=temperature, seed=1)).wait()) == 5


SURPRISES = [RuntimeError("surprise"), DeviceError(DeviceFault.OUT_OF_MEMORY, "full")]


def reason_for(error: Exception) -> Reason:
    return Reason.DEVICE_FAILED if isinstance(error, DeviceError) else Reason.INTERNAL


@pytest.mark.parametrize("error", SURPRISES)
def test_one_request_fails_alone(owner: OwnerHarness, error: Exception) -> None:
    survivor = owner.ask("abc", 300)
    survivor.wait_token()
    runtime = owner.core.resident.runtime

    def failing(*_arguments):  # type: ignore[no-untyped-def]
        raise error

    runtime.open_sequence = failing
    with pytest.raises(OwnerError) as caught:
        owner.ask("abc", 3).wait()
    assert caught.value.reason is reason_for(error)
    del runtime.open_sequence
    assert len(survivor.wait()) == 300
    assert len(owner.ask("abc", 3).wait()) == 3


def test_a_sequence_that_fails_in_a_batch_fails_alone(owner: OwnerHarness) -> None:
    survivor = owner.ask("abc", 300)
    survivor.wait_token()
    runtime = owner.core.resident.runtime
    real = runtime.advance

    def spoiled(sequences):  # type: ignore[no-untyped-def]
        steps = real(sequences)
        return [*steps[:1], *(DeviceError(DeviceFault.CORRUPT, "not finite") for _ in steps[1:])]

    runtime.advance = spoiled
    with pytest.raises(OwnerError) as caught:
        owner.ask("abc", 3).wait()
    assert caught.value.reason is Reason.DEVICE_FAILED
    del runtime.advance
    assert len(survivor.wait()) == 300


@pytest.mark.parametrize("error", SURPRISES)
def test_a_step_that_fails_ends_its_batch_and_not_the_owner(owner: OwnerHarness, error: Exception) -> None:
    running = [owner.ask("abc", 300) for _ in range(2)]
    for answer in running:
        answer.wait_token()
    runtime = owner.core.resident.runtime

    def failing(_sequences):  # type: ignore[no-untyped-def]
        raise error

    runtime.advance = failing
    for answer in running:
        with pytest.raises(OwnerError) as caught:
            answer.wait()
        assert caught.value.reason is reason_for(error)
    del runtime.advance
    assert len(owner.ask("abc", 3).wait()) == 3


BAD_CONFIGS = [
    '{"rope_theta": 1' + "0" * 400 + "}",
    '{"rope_theta": 1e999}',
    '{"vocab_size": ' + "9" * 5000 + "}",
    '{"num_hidden_layers": 1000000000}',
    '{"model_type": ["llama"]}',
    '{"rope_scaling": [1]}',
]


@pytest.mark.parametrize("change", BAD_CONFIGS, ids=[text[:30] for text in BAD_CONFIGS])
def test_no_config_escapes_as_anything_but_a_refusal(
    owner: OwnerHarness, tiny: Path, tmp_path: Path, change: str
) -> None:
    target = copy(tiny, tmp_path / "bad")
    head = json.dumps({key: value for key, value in TINY.items() if f'"{key}"' not in change})
    (target / "config.json").write_text(head[:-1] + ", " + change[1:])
    with pytest.raises(OwnerError) as caught:
        owner.transition(target)
    assert caught.value.reason is Reason.TARGET_INVALID


@pytest.mark.parametrize("shard", ["a\0b", "\ud800", "x" * 300])
def test_no_shard_name_escapes_as_anything_but_a_refusal(
    owner: OwnerHarness, tiny: Path, tmp_path: Path, shard: str
) -> None:
    target = copy(tiny, tmp_path / "bad")
    (target / "model.safetensors").unlink()
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(OwnerError) as caught:
        owner.transition(target)
    assert caught.value.reason is Reason.TARGET_INVALID


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_fifo_or_a_directory_in_a_target_is_refused_at_once(
    owner: OwnerHarness, tiny: Path, tmp_path: Path, name: str
) -> None:
    for kind in (os.mkfifo, os.mkdir):
        target = copy(tiny, tmp_path / kind.__name__)
        (target / name).unlink(missing_ok=True)
        kind(target / name)
        with pytest.raises(OwnerError) as caught:
            owner.transition(target)
        assert caught.value.reason is Reason.TARGET_INVALID
        assert name in str(caught.value)


def test_a_local_manifest_of_any_content_is_only_ignored(owner: OwnerHarness, target: Path) -> None:
    (target / ".rowlock").mkdir()
    metadata = {"format": "rowlock manifest v1", "root": "", "tensors": "[]", "files": "[]"}
    (target / ".rowlock" / "manifest.safetensors").write_bytes(build_header([], metadata))
    assert owner.transition(target).state == "PUBLISHED"


def test_the_old_checkpoint_gone_bad_does_not_hurt_a_reload(owner: OwnerHarness, tiny: Path, tmp_path: Path) -> None:
    base = copy(tiny, tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 5}')
    owner.transition(base)
    (base / "config.json").write_text('{"rope_theta": 1' + "0" * 400 + "}")
    record = owner.transition(tiny, Require.B1)
    assert (record.state, record.reason) == ("FAILED", "IRREVERSIBLE")
    assert len(owner.tokens()) == 12


def test_a_damaged_undo_is_refused(owner: OwnerHarness, target: Path, tiny: Path, tmp_path: Path) -> None:
    base = copy(tiny, tmp_path / "base")
    (base / "generation_config.json").write_text('{"eos_token_id": 5}')
    owner.transition(base)
    record = owner.transition(target)
    (base / "model.safetensors").unlink()
    path = next((owner.state / "undo").glob(f"{record.id}*"))
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    index = json.loads(raw[8 : 8 + length])
    index[0][2] -= 1
    index.append(["model.norm.weight", 0, 1])
    text = json.dumps(index).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    after = owner.rollback()
    assert (after.state, after.reason) == ("FAILED", "ROLLBACK_UNAVAILABLE")
    assert owner.verify().ok


def failing_journal(owner: OwnerHarness, method: str, error: Exception, times: int = 1) -> None:
    """The journal's method raises, so often, before it does anything."""
    journal, left = owner.owner.journal, [times]
    real = getattr(journal, method)

    def fail(*arguments, **named):  # type: ignore[no-untyped-def]
        if left[0]:
            left[0] -= 1
            raise error
        return real(*arguments, **named)

    setattr(journal, method, fail)


def test_a_noop_whose_outcome_cannot_be_recorded_quarantines(owner: OwnerHarness, tiny: Path) -> None:
    failing_journal(owner, "end", JournalError("disk I/O error"), times=2)
    record = owner.transition(tiny)
    assert record.state == "PLANNED"
    assert owner.owner.view.state is OwnerState.QUARANTINED


@pytest.mark.parametrize("method", ["move", "mark_journaled"])
def test_a_journal_that_fails_before_the_first_write_fails_the_transition(
    owner: OwnerHarness, target: Path, method: str
) -> None:
    failing_journal(owner, method, JournalError("disk full"))
    record = owner.transition(target)
    assert (record.state, record.reason) == ("FAILED", "JOURNAL_FAILED")
    assert owner.verify().ok
    assert owner.transition(target).state == "PUBLISHED"


def test_a_publish_that_fails_for_certain_is_undone(owner: OwnerHarness, target: Path) -> None:
    identity = owner.identity
    failing_journal(owner, "publish", JournalError("disk full"))
    record = owner.transition(target)
    assert (record.state, record.reason) == ("ROLLED_BACK", "JOURNAL_FAILED")
    assert owner.identity == identity
    assert owner.verify().ok


@pytest.mark.parametrize("committed", [True, False])
def test_a_publish_of_unknown_outcome_is_settled(owner: OwnerHarness, target: Path, committed: bool) -> None:
    journal, identity = owner.owner.journal, owner.identity
    real = journal.publish

    def publish(*arguments):  # type: ignore[no-untyped-def]
        if committed:
            real(*arguments)
        raise CommitUnknownError("COMMIT: disk I/O error")

    journal.publish = publish  # type: ignore[method-assign]
    record = owner.transition(target)
    assert record.state == ("PUBLISHED" if committed else "ROLLED_BACK")
    assert (owner.identity == identity) is not committed
    assert owner.verify().ok


def test_a_publish_that_nobody_can_settle_quarantines(owner: OwnerHarness, target: Path) -> None:
    failing_journal(owner, "publish", CommitUnknownError("COMMIT: disk I/O error"))
    failing_journal(owner, "settle", JournalError("disk I/O error"), times=9)
    transition = owner.begin(target)
    owner.end_of(transition)
    assert owner.owner.view.state is OwnerState.QUARANTINED
    with pytest.raises(OwnerError) as caught:
        owner.tokens()
    assert caught.value.reason is Reason.QUARANTINED


@pytest.mark.parametrize("there", [True, False])
def test_an_opening_of_unknown_outcome_is_settled(owner: OwnerHarness, target: Path, there: bool) -> None:
    journal = owner.owner.journal
    real = journal.open_transition

    def opening(*arguments):  # type: ignore[no-untyped-def]
        journal.open_transition = real  # type: ignore[method-assign]
        if there:
            real(*arguments)
        raise CommitUnknownError("COMMIT: disk I/O error")

    journal.open_transition = opening  # type: ignore[method-assign]
    if there:
        assert owner.transition(target).state == "PUBLISHED"
    else:
        with pytest.raises(OwnerError) as caught:
            owner.transition(target)
        assert caught.value.reason is Reason.JOURNAL_FAILED
        assert owner.transition(target).state == "PUBLISHED"


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("method", ["move", "mark_journaled"])
def test_a_step_of_unknown_outcome_is_settled(owner: OwnerHarness, target: Path, method: str, settled: bool) -> None:
    """The step is on disk: the transition goes on from it, or, when that cannot be found out, ends after it."""
    journal = owner.owner.journal
    real = getattr(journal, method)

    def step(*arguments, **named):  # type: ignore[no-untyped-def]
        setattr(journal, method, real)
        real(*arguments, **named)
        raise CommitUnknownError("COMMIT: disk I/O error")

    setattr(journal, method, step)
    if not settled:
        failing_journal(owner, "settle", JournalError("disk I/O error"))
    record = owner.transition(target)
    assert record.state == ("PUBLISHED" if settled else "FAILED")
    assert owner.owner.view.state is OwnerState.READY
    assert [event.sequence for event in journal.events(record.id)] == list(range(1, len(journal.events(record.id)) + 1))
    assert owner.transition(target).state == ("NOOP" if settled else "PUBLISHED")


def test_an_owner_thread_that_dies_tells_everybody(owner: OwnerHarness, target: Path) -> None:
    def bug() -> None:
        raise AssertionError("planted")

    running = owner.ask("abc", 1900)
    running.wait_token()
    transition = owner.begin(target)
    verification = owner.owner._ask(lambda _promise: bug())
    for wait in (lambda: verification.result(30), running.wait):
        with pytest.raises(OwnerError) as caught:
            wait()
        assert caught.value.reason is Reason.QUARANTINED
    owner.end_of(transition)
    assert owner.owner.view.state is OwnerState.QUARANTINED
    with pytest.raises(OwnerError):
        owner.tokens()


def test_a_runtime_that_cannot_be_closed_is_never_closed_again(owner: OwnerHarness, target: Path) -> None:
    calls = []

    def close() -> None:
        calls.append(1)
        raise DeviceError(DeviceFault.LOST, "injected")

    owner.core.resident.runtime._inner.close = close
    record = owner.transition(target, Require.B1)
    assert record.state == "QUARANTINED"
    assert calls == [1]
    assert owner.owner.view.state is OwnerState.QUARANTINED


def test_stop_is_neither_lost_nor_overtaken(tiny: Path, tmp_path: Path, target: Path) -> None:
    with running_owner(tmp_path / "state", tiny) as owner:
        answers = [owner.ask("abc", 1500) for _ in range(300)]
        stopper = threading.Thread(target=owner.owner.stop)
        stopper.start()
        stopper.join(30)
        assert not stopper.is_alive()
        for answer in answers:
            with pytest.raises(OwnerError):
                answer.wait()
        with pytest.raises(OwnerError) as caught:
            owner.transition(target)
        assert caught.value.reason is Reason.STOPPING


def test_many_plans_of_one_target_at_once(owner: OwnerHarness, target: Path) -> None:
    digests, errors = set(), []

    def plan() -> None:
        try:
            planned, opened = owner.owner.planner.transition(owner.owner.view.resident, target, Require.AUTO, Options())
            opened.close()
            digests.add(planned.digest)
        except OwnerError as error:
            errors.append(error)

    threads = [threading.Thread(target=plan) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(digests), errors) == (1, [])


def test_a_manifest_that_cannot_be_cached_is_no_obstacle(
    owner: OwnerHarness, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(type(owner.owner.planner.loader.cache), "store", full)
    assert owner.transition(target).state == "PUBLISHED"


def test_many_runs_of_rows_do_not_swell_the_record(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "base", vocab_size=20_000)
    target = change_rows(base, tmp_path / "target", EMBED, list(range(0, 20_000, 2)), negate)
    with running_owner(tmp_path / "state", base) as owner:
        record = owner.transition(target)
        assert (record.state, record.rows_written, record.write_runs) == ("PUBLISHED", 10_000, 10_000)
        assert len(record.to_json()) < 10_000
        assert len(owner.writes(record)) == 10_000
        assert owner.verify().ok


def test_clients_that_gave_up_do_not_fill_the_queue(owner: OwnerHarness) -> None:
    owner.core.scheduler.admitting = False
    for _ in range(256):
        request = GenerationRequest("r", "a", 1, Sampling(), True, Answer())
        request.cancelled.set()
        owner.owner.generate(request)
    live = owner.ask("a", 1)
    owner.verify()
    owner.core.scheduler.admitting = True
    owner.owner.verify().result(30)
    assert len(live.wait()) == 1


def test_a_journal_that_lost_its_connection_can_be_used_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "cpu")
    journal._file._db.close()
    with pytest.raises((JournalError, sqlite3.ProgrammingError)):
        journal.record_quarantine("x", 0.0)
    assert journal.settle("nothing") == ""
    journal.record_quarantine("x", 0.0)
    assert journal.quarantine() == "x"


def test_untouched_checkpoints_stay_rebuildable_after_others_with_the_same_weights(
    owner: OwnerHarness, tiny: Path, tmp_path: Path
) -> None:
    other = copy(tiny, tmp_path / "other")
    (other / "generation_config.json").write_text('{"eos_token_id": 5}')
    owner.transition(other)
    owner.transition(tiny)
    deeper = write_tiny(tmp_path / "deeper", num_hidden_layers=3)
    plan, opened = owner.owner.planner.transition(owner.owner.view.resident, deeper, Require.AUTO, Options())
    opened.close()
    assert not plan.irreversible


def test_a_tensor_without_elements_is_refused_by_shape(owner: OwnerHarness, tiny: Path, tmp_path: Path) -> None:
    target = copy(tiny, tmp_path / "empty")
    tensors = {k: v for k, v in random_tensors(TINY, 0).items() if k.name != "model.norm.weight"}
    write_weights(target, {**tensors, TensorInfo("model.norm.weight", "BF16", (0,)): b""})
    with Checkpoint.open(target) as checkpoint:
        owner.core.loader.hasher.manifest(checkpoint, {})
    with pytest.raises(OwnerError, match=r"model\.norm\.weight"):
        owner.transition(target)


def test_a_cancelled_noop_leaves_nothing_open(owner: OwnerHarness, tiny: Path, target: Path) -> None:
    release = threading.Event()
    blockers = [owner.core.context.workers.submit(release.wait, 60) for _ in range(3)]
    real = owner.owner.journal.open_transition
    opened = threading.Event()

    def slow(*arguments):  # type: ignore[no-untyped-def]
        real(*arguments)
        blockers.append(owner.core.context.workers.submit(release.wait, 60))
        opened.set()

    owner.owner.journal.open_transition = slow  # type: ignore[method-assign]
    transition = owner.begin(tiny)
    opened.wait(10)
    owner.owner.cancel(transition).result(30)
    release.set()
    assert owner.end_of(transition).state in {"CANCELLED", "NOOP"}
    assert owner.owner.journal.open_transitions() == []
    owner.owner.journal.open_transition = real  # type: ignore[method-assign]
    assert owner.transition(target).state == "PUBLISHED"


def test_an_opening_that_was_never_settled_is_ended_at_the_next(
    owner: OwnerHarness, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = owner.owner.journal
    real = journal.open_transition

    def opening(*arguments):  # type: ignore[no-untyped-def]
        real(*arguments)
        raise CommitUnknownError("COMMIT: disk I/O error")

    def broken(*_arguments: object) -> None:
        raise JournalError("disk I/O error")

    monkeypatch.setattr(journal, "open_transition", opening)
    monkeypatch.setattr(journal, "settle", broken)
    monkeypatch.setattr(journal, "find", broken)
    with pytest.raises(OwnerError) as caught:
        owner.transition(target)
    assert caught.value.reason is Reason.JOURNAL_FAILED
    assert len(journal.open_transitions()) == 1
    monkeypatch.undo()
    assert owner.transition(target).state == "PUBLISHED"
    assert journal.open_transitions() == []


def test_what_a_killed_process_was_writing_is_cleared(tiny: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    for place in ("undo", "pushed", "manifests/by-root", "assets/x"):
        (state / place).mkdir(parents=True)
        (state / place / "a.undo.123.partial").write_bytes(b"x")
        (state / place / "b.undo.reserved").write_bytes(b"x")
    with running_owner(state, tiny):
        left = [path for path in state.rglob("*") if path.name.endswith((".partial", ".reserved"))]
        assert left == []


def test_manifests_and_assets_of_forgotten_identities_are_swept(
    owner: OwnerHarness, tiny: Path, tmp_path: Path
) -> None:
    for index in range(12):
        target = change_rows(tiny, tmp_path / f"t{index}", EMBED, [index], negate)
        (target / "generation_config.json").write_text(json.dumps({"eos_token_id": index}))
        owner.transition(target)
    assert len(list((owner.state / "manifests" / "by-root").iterdir())) <= 10
    assert len(list((owner.state / "assets").iterdir())) <= 10
    assert owner.rollback(to=6).state == "PUBLISHED"


def test_ballast_that_could_not_be_reserved_is_no_ballast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path, "cpu")

    def full(*_arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            journal.reserve_ballast()
    monkeypatch.undo()
    journal.reserve_ballast()
    assert (tmp_path / "ballast").stat().st_size == 1 << 20


def test_a_fifo_as_local_manifest_is_ignored(owner: OwnerHarness, target: Path) -> None:
    (target / ".rowlock").mkdir()
    os.mkfifo(target / ".rowlock" / "manifest.safetensors")
    assert owner.transition(target).state == "PUBLISHED"


def test_staging_works_under_any_niceness() -> None:
    code = (
        "import os, types; os.nice(12)\n"
        "from rowlock.daemon.pacing import PacedExecutor\n"
        "decoder = types.SimpleNamespace(decoding=True, steps=0, stepped=0.0)\n"
        "with PacedExecutor(2, decoder) as executor: print(sum(executor.map(int, '12345')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "15"
