"""A bit that flips in a resident allocation is found, and dealt with as the operator wants."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows, copy, negate
from support.commands import rowlock
from support.daemons import answer, owner, states
from support.owners import WAIT_S, Answer, OwnerHarness, running_owner

from rowlock.bindings.device import Sampling
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.daemon.owner.drift import DriftPolicy, Upkeep
from rowlock.daemon.owner.requests import GenerationRequest
from rowlock.daemon.owner.scheduler import ACTIVE_MAX
from rowlock.daemon.owner.verification import Sample
from rowlock.daemon.owner.view import OwnerView
from rowlock.v1 import owner_pb2
from rowlock.v1.errors import OwnerError, Reason

ROT = json.dumps({"operation": "read", "effect": "rot", "bit": 6})
"""The first read flips a bit of the first value that it reads, in the allocation itself."""


@contextmanager
def daemon_with(policy: str, checkpoint: Path, directory: Path, share: float = 0.5) -> Iterator[DaemonProcess]:
    """A real daemon that scrubs when it is idle."""
    config = directory / "owner.toml"
    config.write_text(f'[drift]\npolicy = "{policy}"\nscrub_share = {share}\n')
    options = ["--config", str(config), "--checkpoint", str(checkpoint), "--threads", "1"]
    options += ["--test-fault-file", str(directory / "fault.json")]
    with DaemonProcess(directory / "state", options) as daemon:
        yield daemon


def watch(daemon: DaemonProcess) -> Iterator[owner_pb2.Owner]:
    """What WatchOwner says from now on."""
    for item in daemon.client.stream(daemon.client.owner.WatchOwner, owner_pb2.WatchOwnerRequest()):
        yield item.owner


def chain_states(daemon: DaemonProcess) -> list[tuple[str, str, bool]]:
    answers = daemon.client.stream(daemon.client.owner.ReadHistory, owner_pb2.ReadHistoryRequest())
    return [(item.event.state, item.event.message, bool(item.event.signature)) for item in answers]


def rot(daemon: DaemonProcess, directory: Path) -> Iterator[owner_pb2.Owner]:
    """Flip a bit below the daemon's next read; then what WatchOwner says."""
    news = watch(daemon)
    assert not next(news).drift
    (directory / "fault.json").write_text(ROT)
    return news


def test_report_says_so_everywhere_and_goes_on(tiny: Path, tmp_path: Path) -> None:
    with daemon_with("report", tiny, tmp_path) as daemon:
        found = next(item for item in rot(daemon, tmp_path) if item.drift)
        assert (found.state, found.generation) == (owner_pb2.OWNER_STATE_READY, 1)
        (drift,) = found.drift
        assert drift.rows > 0
        described = daemon.client.call(daemon.client.owner.Describe, owner_pb2.DescribeRequest())
        assert list(described.owner.drift) == [drift]
        endpoint = daemon.client.endpoint
        assert f"DRIFT      {drift.tensor}, within rows {drift.first_row}" in rowlock("status", endpoint=endpoint).out
        verified = rowlock("verify", "--json", endpoint=endpoint)
        assert (verified.code, verified.json["drift"][0]["tensor"]) == (7, drift.tensor)
        reports = [(message, signed) for state, message, signed in chain_states(daemon) if state == "DRIFT"]
        assert [(drift.tensor in message, signed) for message, signed in reports] == [(True, True)], (
            "once, not each pass"
        )
        assert "drift.found" in (tmp_path / "state" / "daemon.log").read_text()
        assert owner(daemon).generation == 1
        answer(daemon)
        told = rowlock("history", "--owner", "--json", endpoint=endpoint).json
        assert [event["state"] for event in told] == ["KEY", "DRIFT"]
        assert "DRIFT       generation 1: " in rowlock("history", "--owner", endpoint=endpoint).out


def test_repair_is_a_transition_with_the_drifted_bytes_as_evidence(tiny: Path, tmp_path: Path) -> None:
    target = change_rows(tiny, tmp_path / "target", EMBED, [5], negate)
    with daemon_with("repair", tiny, tmp_path) as daemon:
        before = answer(daemon)
        daemon.client.call(daemon.client.owner.Verify, owner_pb2.VerifyRequest())
        list(daemon.client.stream(daemon.client.owner.Transition, owner_pb2.TransitionRequest(target=str(target))))
        moved = owner(daemon)
        repaired = next(item for item in rot(daemon, tmp_path) if item.generation == 3 and not item.transition)
        assert repaired.identity == moved.identity
        listed = daemon.client.call(daemon.client.owner.ListTransitions, owner_pb2.ListTransitionsRequest())
        record = listed.records[0]
        assert (record.kind, record.rows_written, record.to) == ("repair", 1, moved.identity)
        assert getattr(record, "from").weights not in {"", moved.identity.weights}, "what was really there"
        got = daemon.client.call(daemon.client.owner.GetTransition, owner_pb2.GetTransitionRequest(id=record.id))
        assert states(list(got.events)) == ["PLANNED", "STAGED", "JOURNALED", "APPLYING", "VERIFYING", "PUBLISHED"]
        evidence = (tmp_path / "state" / "undo" / f"{record.id}.undo").read_bytes()
        assert record.groups == 1
        assert len(evidence) > 64
        verified = daemon.client.call(daemon.client.owner.Verify, owner_pb2.VerifyRequest())
        assert (verified.ok, verified.generation) == (True, 3)
        assert not owner(daemon).drift
        back = [item.event for item in daemon.client.stream(daemon.client.owner.Rollback, owner_pb2.RollbackRequest())]
        assert back[-1].record.rows_written == 1, "over the repair, to the identity before, from its undo"
        assert answer(daemon) == before
        assert rowlock("history", "--verify", endpoint=daemon.client.endpoint).code == 0


def test_quarantine_serves_nothing_and_outlives_the_process(tiny: Path, tmp_path: Path) -> None:
    with daemon_with("quarantine", tiny, tmp_path) as daemon:
        found = next(item for item in rot(daemon, tmp_path) if item.state == owner_pb2.OWNER_STATE_QUARANTINED)
        assert "drift: " in found.reason
        assert rowlock("generate", "x", endpoint=daemon.client.endpoint).code == 6
        assert rowlock("transition", "--target", tiny, endpoint=daemon.client.endpoint).code == 6
        assert [state for state, *_ in chain_states(daemon) if state in {"DRIFT", "QUARANTINED"}] == [
            "DRIFT",
            "QUARANTINED",
        ]
    with DaemonProcess(tmp_path / "state", ["--threads", "1"], ready=False) as daemon:
        state = next(item for item in watch(daemon) if item.state != owner_pb2.OWNER_STATE_LOADING)
        assert state.state == owner_pb2.OWNER_STATE_QUARANTINED


def test_a_repair_that_cannot_be_had_withdraws_the_model(tiny: Path, tmp_path: Path) -> None:
    base = copy(tiny, tmp_path / "base")
    with daemon_with("repair", base, tmp_path) as daemon:
        base.rename(tmp_path / "away")
        found = next(item for item in rot(daemon, tmp_path) if item.state == owner_pb2.OWNER_STATE_EMPTY)
        assert "cannot be repaired" in found.reason
        assert rowlock("generate", "x", endpoint=daemon.client.endpoint).code == 3


def wait_for(owner: OwnerHarness, wanted: Callable[[OwnerView], bool]) -> None:
    """Until the view is as wanted; gives way meanwhile, so that the owner thread gets its turn."""
    deadline = time.monotonic() + WAIT_S
    while not wanted(owner.owner.view):
        assert time.monotonic() < deadline, "the owner never came to what was waited for"
        time.sleep(0.001)


@pytest.fixture
def repairing(tmp_path: Path, tiny: Path, fault_file: Path) -> Iterator[OwnerHarness]:
    upkeep = Upkeep(DriftPolicy.REPAIR)
    with running_owner(tmp_path / "state", tiny, fault_file, upkeep=upkeep) as harness:
        yield harness


def records(owner: OwnerHarness) -> list[tuple[str, str]]:
    """Kind and state of every transition, newest first, once nothing is open."""
    owner.verify()
    wait_for(owner, lambda view: not view.transition and not view.drift)
    rows = owner.owner.journal.transitions(10)
    return [(json.loads(row.record)["kind"], row.state) for row in rows]


def test_a_repair_that_fails_while_writing_closes_the_model(repairing: OwnerHarness, fault_file: Path) -> None:
    """The bytes before were no identity: they are not brought back as one."""
    fault_file.write_text(ROT)
    repairing.owner.verify().result(60)
    fault_file.write_text(json.dumps({"operation": "write", "effect": "flip"}))
    wait_for(repairing, lambda view: view.resident is None)
    (newest, *_) = repairing.owner.journal.transitions(1)
    record = repairing.record(repairing.end_of(newest.id).id)
    assert (record.kind, record.state, record.reason) == ("repair", "UNLOADED", "VERIFY_MISMATCH")
    assert "left behind: " in repairing.owner.journal.events(newest.id)[-1].message


def test_a_model_is_not_closed_under_an_open_transition(repairing: OwnerHarness, tiny: Path, tmp_path: Path) -> None:
    """The repair cannot be had, so the model is to be withdrawn: but only once the transition has ended."""
    target = change_rows(tiny, tmp_path / "target", EMBED, [5], negate)
    running = [repairing.ask("abc", 1900) for _ in range(ACTIVE_MAX)][-1]
    running.wait_token()
    transition = repairing.begin(target)
    wait_for(repairing, lambda _: not repairing.core.scheduler.admitting)
    resident, keeper = repairing.owner.view.resident, repairing.owner._keeper
    assert resident is not None
    name = next(name for name in resident.model.manifest.tensors if name != EMBED)
    tensor = resident.model.manifest.tensors[name]
    found = {name: dataclasses.replace(tensor, digests=bytes(len(tensor.digests)))}

    def unavailable(*_arguments: object) -> None:
        raise OwnerError(Reason.TARGET_CHANGED, "the checkpoint is gone")

    object.__setattr__(keeper.planner, "repair", unavailable)
    heeded = repairing.owner._ask(lambda promise: repairing.owner._answer(promise, keeper.heed(resident, found)))
    wait_for(repairing, lambda view: bool(view.drift))
    assert not heeded.done()
    repairing.owner.cancel(transition).result(WAIT_S)
    assert repairing.end_of(transition).state == "CANCELLED"
    heeded.result(WAIT_S)
    view = repairing.owner.view
    assert (view.resident, "cannot be repaired" in view.reason) == (None, True)
    with pytest.raises(OwnerError) as caught:
        running.wait()
    assert caught.value.reason is Reason.DRIFT
    assert repairing.transition(target).state == "PUBLISHED"


def test_drift_of_two_allocations_is_one_repair(repairing: OwnerHarness, tiny: Path) -> None:
    memory = repairing.core.binding.memory
    resident = repairing.owner.view.resident
    assert resident is not None
    for allocation in list(resident.runtime.allocations.values())[:2]:
        memory._inner.tensor(allocation).view(-1)[3] += 1
    drifted = repairing.tokens()
    assert records(repairing) == [("repair", "PUBLISHED"), ("load", "PUBLISHED")]
    assert repairing.verify().ok
    repair = repairing.record(repairing.owner.journal.transitions(1)[0].id)
    assert len({write.parent for write in repairing.writes(repair)}) == 2
    assert repairing.tokens() != drifted


def test_a_read_that_lies_once_is_not_drift(tiny: Path, tmp_path: Path, fault_file: Path) -> None:
    """The scrub reads again before it says anything."""
    upkeep = Upkeep(DriftPolicy.QUARANTINE, 0.5)
    with running_owner(tmp_path / "state", tiny, fault_file, upkeep=upkeep) as owner:
        fault_file.write_text(json.dumps({"operation": "read", "effect": "flip"}))
        wait_for(owner, lambda _: not fault_file.exists())
        passed = owner.owner.view.scrubbed
        wait_for(owner, lambda view: view.scrubbed > passed)
        assert not owner.owner.view.quarantined
        assert owner.owner.view.drift == ()


def test_the_scrub_waits_while_anything_else_goes_on(tiny: Path, tmp_path: Path, fault_file: Path) -> None:
    with running_owner(tmp_path / "state", tiny, fault_file, upkeep=Upkeep(scrub_share=0.5)) as owner:
        read: list[int] = []

        class Noting(Answer):
            def token(self, token: int) -> None:
                read.append(owner.core.binding.counters.bytes_read_back)
                super().token(token)

        wait_for(owner, lambda view: view.scrubbed > 0)
        answer = Noting()
        owner.owner.generate(GenerationRequest("r", "abc", 200, Sampling(), True, answer))
        assert len(answer.wait()) == 200
        assert len(set(read)) == 1
        scrubbed = owner.owner.view.scrubbed
        wait_for(owner, lambda view: view.scrubbed > scrubbed)


def test_a_sample_is_decided_by_its_seed(owner: OwnerHarness) -> None:
    one, again, other = (owner.owner.verify(Sample(2, seed)).result(60) for seed in (7, 7, 8))
    assert one.ok
    assert (len(one.parents), one.weights) == (2, "")
    assert one.parents == again.parents != other.parents
    assert one.bytes_read_back < owner.verify().bytes_read_back
    assert owner.owner.verify(Sample(10**6, 1)).result(60).parents == tuple(sorted(owner.verify().parents))


def test_a_sample_on_the_command_line(tiny: Path, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(tiny), "--threads", "1"]) as daemon:
        endpoint = daemon.client.endpoint
        first = rowlock("verify", "--sample", 2, "--json", endpoint=endpoint)
        assert (first.code, len(first.json["parents"])) == (0, 2)
        again = rowlock("verify", "--sample", 2, "--seed", first.json["seed"], "--json", endpoint=endpoint)
        assert again.json["parents"] == first.json["parents"]
        assert f"--seed {first.json['seed']}" in rowlock(
            "verify", "--sample", 2, "--seed", first.json["seed"], endpoint=endpoint
        ).out  # fmt: skip
        assert rowlock("verify", "--seed", 3, endpoint=endpoint).code == 2
