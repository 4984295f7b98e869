"""The source follows what is resident: after each transition its prompts are those of the new identity."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import EMBED, Q0, change_rows, copy, negate, read_tensor, write_tiny
from support.owners import Answer, running_owner
from support.prefilling import Gate, Remote, fails, remote_owner, slow_down

from rowlock.daemon.owner.options import Drain
from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.prefill.keeper import SourceKeeper
from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.v1.errors import Reason

SURVIVOR = "I will be here until the end. "
PROMPT = "Something of which the beginning is known. "


def reference(tmp_path: Path, checkpoint: Path) -> list[int]:
    with running_owner(tmp_path / f"state-of-{checkpoint.name}", checkpoint) as harness:
        return harness.tokens(PROMPT, 24)


def published(record: TransitionRecord, level: str) -> None:
    assert (record.state, record.level) == ("PUBLISHED", level)


def test_after_every_kind_of_transition_prompts_are_those_of_the_new_identity(tmp_path: Path, tiny: Path) -> None:
    changed = change_rows(tiny, tmp_path / "changed", Q0, [0, 5, 9], negate)
    other = write_tiny(tmp_path / "other", seed=3, num_hidden_layers=3)
    expected = {path: reference(tmp_path, path) for path in (tiny, changed, other)}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    with remote_owner(tmp_path / "state", tiny, mode=Mode.STREAM) as remote:
        assert remote.ask(PROMPT, 24).wait() == expected[tiny]
        pid = remote.view.pid
        published(remote.harness.transition(changed), "B2")
        assert remote.view.pid != pid, "publishing switches to the source that was prepared"
        assert remote.ask(PROMPT, 24).wait() == expected[changed]
        published(remote.harness.rollback(), "B2")
        assert remote.ask(PROMPT, 24).wait() == expected[tiny]
        published(remote.harness.transition(other), "B1")
        assert remote.ask(PROMPT, 24).wait() == expected[other]
        remote.settle()
        remote.check_counters(4)
        source = remote.view.pid
    assert not Path(f"/proc/{source}").exists(), "the source ends with its owner"


@contextlib.contextmanager
def held_up(remote: Remote, orders: Path) -> Iterator[Answer]:
    """A request whose prompt is half imported; let go at the end of the block, if its source still lives."""
    gate, pid = Gate(orders), remote.view.pid
    gate.close_at(1)
    answer = remote.ask(PROMPT, 24)
    remote.until_spans(1)
    gate.wait()
    yield answer
    if remote.view.pid == pid:
        gate.open()


@pytest.fixture
def sabotaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, object], Path]:
    """A source that a file can hold up; and that file."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[1]))
    orders = tmp_path / "orders.json"
    return {"factory": "support.saboteur:create", "extra": {"orders": str(orders)}}, orders


@pytest.mark.parametrize("drain", Drain)
def test_a_prompt_on_its_way_is_awaited_or_ended_as_any_request_is(
    tmp_path: Path, tiny: Path, sabotaged: tuple[dict[str, object], Path], drain: Drain
) -> None:
    """Its lease is of the old identity, and so is its answer; those that came later are answered by the new one."""
    source, orders = sabotaged
    changed = change_rows(tiny, tmp_path / "changed", Q0, [0, 5, 9], negate)
    old, new = reference(tmp_path, tiny), reference(tmp_path, changed)
    assert old != new
    with remote_owner(tmp_path / "state", tiny, source, mode=Mode.STREAM) as remote:
        before, options = remote.harness.identity, {"drain_deadline_s": 0.3} if drain is Drain.DEADLINE else {}
        with held_up(remote, orders) as answer:
            transition = remote.harness.begin(changed, drain=drain, **options)
            while remote.harness.core.scheduler.admitting and remote.harness.owner.is_live(transition):
                remote.turn()
            later = [remote.ask(PROMPT, 24) for _ in range(4)]
            if drain is Drain.CANCEL:
                assert fails(answer).reason is Reason.DRAINED
            if drain is not Drain.WAIT:
                record = remote.harness.end_of(transition)
            assert drain is Drain.CANCEL or remote.harness.identity == before
        if drain is Drain.WAIT:
            record = remote.harness.end_of(transition)
        assert record.state == ("CANCELLED" if drain is Drain.DEADLINE else "PUBLISHED")
        if drain is not Drain.CANCEL:
            assert (answer.wait(), answer.identity) == (old, before)
        expected = old if drain is Drain.DEADLINE else new
        assert [item.wait() for item in later] == [expected] * 4
        assert {item.identity.digest for item in later} == {remote.harness.identity.digest}
        assert (remote.harness.identity == before) == (drain is Drain.DEADLINE)
        remote.settle()
        remote.check_counters(4 + (drain is not Drain.CANCEL))


@pytest.mark.campaign
def test_a_transition_can_be_cancelled_while_its_source_starts(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = change_rows(tiny, tmp_path / "changed", Q0, [0], negate)
    with remote_owner(tmp_path / "state", tiny) as remote:
        expected, pid, begun = remote.ask(PROMPT, 24).wait(), remote.view.pid, threading.Event()
        spawn = SourceKeeper._spawn

        def stopped(self: SourceKeeper, fd: int) -> subprocess.Popen[bytes]:
            process = spawn(self, fd)
            process.send_signal(signal.SIGSTOP)
            begun.set()
            return process

        monkeypatch.setattr(SourceKeeper, "_spawn", stopped)
        transition = remote.harness.begin(changed)
        assert begun.wait(60)
        remote.harness.owner.cancel(transition).result(60)
        assert remote.harness.end_of(transition).state == "CANCELLED"
        assert (remote.view.pid, remote.ask(PROMPT, 24).wait()) == (pid, expected)
        remote.settle()


@pytest.mark.campaign
def test_after_a_failed_reload_prompts_are_those_of_the_old_identity(
    tmp_path: Path, tiny: Path, fault_file: Path
) -> None:
    other = write_tiny(tmp_path / "other", seed=3, num_hidden_layers=3)
    with remote_owner(tmp_path / "state", tiny, owner={"fault_file": fault_file}) as remote:
        expected = remote.ask(PROMPT, 24).wait()
        fault_file.write_text('{"operation": "write", "effect": "flip"}')
        assert remote.harness.transition(other).state == "ROLLED_BACK"
        remote.ready()
        assert remote.ask(PROMPT, 24).wait() == expected
        remote.settle()
        remote.check_counters(2)


def test_a_source_that_ends_is_started_from_where_its_weights_lie_now(tmp_path: Path, tiny: Path) -> None:
    """Only the tokenizer was changed, so it was not started anew; the directory that it came from is gone."""
    first, second = copy(tiny, tmp_path / "first"), copy(tiny, tmp_path / "second")
    tokenizer = json.loads((second / "tokenizer.json").read_text())
    (second / "tokenizer.json").write_text(json.dumps({**tokenizer, "decoder": {"type": "ByteFallback"}}))
    with remote_owner(tmp_path / "state", first) as remote:
        expected, pid = remote.ask(PROMPT, 24).wait(), remote.view.pid
        published(remote.harness.transition(second), "B2")
        assert remote.view.pid == pid
        shutil.rmtree(first)
        os.kill(pid, signal.SIGKILL)
        remote.until(lambda view: view.state == "READY" and view.pid != pid)
        assert remote.ask(PROMPT, 24).wait() == expected
        remote.settle()


@pytest.mark.campaign
def test_a_transition_that_does_not_publish_keeps_the_source(tmp_path: Path, tiny: Path, fault_file: Path) -> None:
    changed = change_rows(tiny, tmp_path / "changed", Q0, [0], negate)
    with remote_owner(tmp_path / "state", tiny, owner={"fault_file": fault_file}) as remote:
        expected, pid = remote.ask(PROMPT, 24).wait(), remote.view.pid
        fault_file.write_text('{"operation": "write", "effect": "flip"}')
        assert remote.harness.transition(changed).state == "ROLLED_BACK"
        assert remote.view.pid == pid
        assert remote.ask(PROMPT, 24).wait() == expected
        remote.settle()


@pytest.mark.campaign
def test_what_no_source_can_compute_is_refused_or_served_without_one(tmp_path: Path, tiny: Path) -> None:
    """Pushed rows lie in no checkpoint."""
    row = negate(read_tensor(tiny, EMBED)[:128])
    with remote_owner(tmp_path / "required", tiny) as remote:
        expected, pid = remote.ask(PROMPT, 24).wait(), remote.view.pid
        record = remote.harness.push({EMBED: {0: row}})
        assert (record.state, record.reason) == ("FAILED", Reason.SOURCE_ABSENT.value)
        assert "hello.weights" in record.message
        assert (remote.view.pid, remote.ask(PROMPT, 24).wait()) == (pid, expected)
    with running_owner(tmp_path / "local", tiny) as local:
        published(local.push({EMBED: {0: row}}), "B2")
        pushed = local.tokens(PROMPT, 24)
    with remote_owner(tmp_path / "drop", tiny, required=False) as remote:
        published(remote.harness.push({EMBED: {0: row}}), "B2")
        assert remote.ask(PROMPT, 24).wait() == pushed
        assert (remote.view.state, remote.view.counters.fallbacks) == ("NONE", 0)
        published(remote.harness.rollback(), "B2")
        assert remote.ask(PROMPT, 24).wait() == expected
        remote.ready()
        assert remote.view.counters.remote == 1


@pytest.mark.campaign
def test_a_source_that_comes_back_with_other_weights_is_refused(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    with remote_owner(tmp_path / "state", model) as remote:
        assert remote.ask(PROMPT, 24).wait() == reference(tmp_path, tiny)
        alone = remote.ask(SURVIVOR, 1900).wait()
        slow_down(monkeypatch)
        survivor = remote.ask(SURVIVOR, 1900)
        survivor.wait_token()
        other = change_rows(tiny, tmp_path / "changed", Q0, [0], negate)
        (other / "model.safetensors").rename(model / "model.safetensors")
        os.kill(remote.view.pid, signal.SIGKILL)
        view = remote.until(lambda view: view.state == "ABSENT" and "refused" in view.reason)
        assert "hello.weights is" in view.reason
        error = fails(remote.ask(PROMPT, 24))
        assert error.reason is Reason.SOURCE_ABSENT
        assert "hello.weights" in str(error)
        assert survivor.stopped is None, "it had ended before"
        assert survivor.wait() == alone
        remote.settle()


def test_without_its_source_an_owner_computes_prompts_itself_only_when_told_to(tmp_path: Path, tiny: Path) -> None:
    expected = reference(tmp_path, tiny)
    source = {"python": "/no/such/python"}
    with remote_owner(tmp_path / "refusing", tiny, source, wait=False) as remote:
        remote.until(lambda view: view.state == "ABSENT")
        error = fails(remote.ask(PROMPT, 24))
        assert (error.reason, "No such file" in str(error)) == (Reason.SOURCE_ABSENT, True)
    with remote_owner(tmp_path / "falling-back", tiny, source, wait=False, fallback=True) as remote:
        remote.until(lambda view: view.state == "ABSENT")
        assert remote.ask(PROMPT, 24).wait() == expected
        assert (remote.view.counters.fallbacks, remote.view.counters.remote) == (1, 0)
        assert isinstance(remote, Remote)


@pytest.mark.campaign
@pytest.mark.parametrize("fallback", [False, True])
def test_a_prompt_that_is_too_wide_for_the_source_is_its_own_error(tmp_path: Path, tiny: Path, fallback: bool) -> None:
    with remote_owner(tmp_path / "state", tiny, {"widths": (16, 40)}, fallback=fallback) as remote:
        wide = remote.ask("x" * 41, 24)
        if fallback:
            assert wide.wait()
        else:
            error = fails(wide)
            assert error.reason is Reason.CONTEXT_EXCEEDED
            assert "41 prompt tokens; the widest program of the source is for 40" in str(error)
        assert remote.ask("x" * 40, 24).wait()
        assert (remote.view.counters.remote, remote.view.counters.fallbacks) == (1, int(fallback))
