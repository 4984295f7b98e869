"""The source follows what is resident: after each transition its prompts are those of the new identity."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from support.checkpoints import EMBED, Q0, change_rows, negate, read_tensor, write_tiny
from support.owners import running_owner
from support.prefilling import Remote, fails, remote_owner

from rowlock.daemon.owner.record import TransitionRecord
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
        counters = remote.view.counters
        assert (counters.remote, counters.failed, counters.fallbacks) == (4, 0, 0)
        source = remote.view.pid
    assert not Path(f"/proc/{source}").exists(), "the source ends with its owner"


@pytest.mark.campaign
def test_requests_on_their_way_are_answered_under_one_identity(tmp_path: Path, tiny: Path) -> None:
    changed = change_rows(tiny, tmp_path / "changed", Q0, [0, 5, 9], negate)
    expected = {reference(tmp_path, tiny)[0]: tiny, reference(tmp_path, changed)[0]: changed}
    assert len(expected) == 2
    with remote_owner(tmp_path / "state", tiny, mode=Mode.STREAM) as remote:
        before = remote.harness.identity.digest
        transition = remote.harness.begin(changed)
        answers = [remote.ask(PROMPT, 24) for _ in range(6)]
        remote.harness.end_of(transition)
        after = [remote.ask(PROMPT, 24) for _ in range(2)]
        for answer in [*answers, *after]:
            first = answer.wait()[0]
            assert (answer.identity.digest == before) == (expected[first] == tiny)
        assert all(answer.identity.digest != before for answer in after)
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
def test_a_source_that_comes_back_with_other_weights_is_refused(tmp_path: Path, tiny: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    with remote_owner(tmp_path / "state", model) as remote:
        assert remote.ask(PROMPT, 24).wait()
        alone = remote.ask(SURVIVOR, 512).wait()
        survivor = remote.ask(SURVIVOR, 512)
        survivor.wait_token()
        other = change_rows(tiny, tmp_path / "changed", Q0, [0], negate)
        (other / "model.safetensors").rename(model / "model.safetensors")
        os.kill(remote.view.pid, signal.SIGKILL)
        view = remote.until(lambda view: view.state == "ABSENT" and "refused" in view.reason)
        assert "hello.weights is" in view.reason
        error = fails(remote.ask(PROMPT, 24))
        assert error.reason is Reason.SOURCE_ABSENT
        assert "hello.weights" in str(error)
        assert survivor.wait() == alone


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
