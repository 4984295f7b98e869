"""The real daemon process, through its real clients: gRPC and the command line."""

from __future__ import annotations

import json
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from support.checkpoints import EMBED, change_rows, copy, negate
from support.commands import rowlock
from support.daemons import answer, owner, refused, states, transition

from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import inference_pb2, owner_pb2
from rowlock.v1.errors import Reason


@pytest.fixture
def daemon(tmp_path: Path, tiny: Path, fault_file: Path) -> Iterator[DaemonProcess]:
    options = ["--checkpoint", str(tiny), "--test-fault-file", str(fault_file), "--threads", "1"]
    with DaemonProcess(tmp_path / "state", options) as process:
        yield process


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[DaemonProcess]:
    """One that no test changes."""
    with DaemonProcess(
        tmp_path_factory.mktemp("still") / "state", ["--checkpoint", str(tiny), "--threads", "1"]
    ) as process:
        yield process


@pytest.fixture
def target(tiny: Path, tmp_path: Path) -> Path:
    return change_rows(tiny, tmp_path / "target", EMBED, [5, 200], negate)


def test_a_transition_over_grpc_and_back(daemon: DaemonProcess, tiny: Path, target: Path) -> None:
    before = answer(daemon)
    plan = daemon.client.call(daemon.client.owner.Plan, owner_pb2.PlanRequest(target=str(target))).plan
    assert (plan.level, plan.generation, len(plan.changes)) == (owner_pb2.LEVEL_B2, 1, 1)
    events = transition(daemon, target=str(target), plan_digest=plan.digest, request_id="r-1")
    assert states(events) == ["PLANNED", "STAGED", "JOURNALED", "APPLYING", "VERIFYING", "PUBLISHED"]
    assert [event.sequence for event in events] == list(range(1, 7))
    record = events[-1].record
    assert (record.rows_written, record.generation, record.to) == (2, 2, plan.to)
    assert record.exclusive_ms > 0
    assert record.blocked_ms >= record.exclusive_ms
    assert record.bytes_read_back == 2 * plan.parent_bytes
    assert owner(daemon).identity == plan.to
    assert answer(daemon)[1] == plan.to.digest != before[1]
    again = transition(daemon, target=str(target), plan_digest=plan.digest, request_id="r-1")
    assert again == events, "the same request id is the same transition"
    request = owner_pb2.RollbackRequest(generation=2)
    back = [item.event for item in daemon.client.stream(daemon.client.owner.Rollback, request)]
    assert states(back)[-1] == "PUBLISHED"
    assert answer(daemon) == before
    got = daemon.client.call(daemon.client.owner.GetTransition, owner_pb2.GetTransitionRequest(id="r-1"))
    assert got.record == record
    listed = daemon.client.call(daemon.client.owner.ListTransitions, owner_pb2.ListTransitionsRequest())
    assert [item.kind for item in listed.records] == ["rollback", "transition", "load"]
    verified = daemon.client.call(daemon.client.owner.Verify, owner_pb2.VerifyRequest())
    assert verified.ok
    assert verified.weights == owner(daemon).identity.weights


def test_describe_names_allocations_and_counts(daemon: DaemonProcess, target: Path) -> None:
    def describe() -> owner_pb2.DescribeResponse:
        return daemon.client.call(daemon.client.owner.Describe, owner_pb2.DescribeRequest())

    before = describe()
    record = transition(daemon, target=str(target))[-1].record
    after = describe()
    assert {p.name: p.allocation for p in before.parents} == {p.name: p.allocation for p in after.parents}
    embed = next(parent for parent in after.parents if parent.name == "embed")
    assert {item.allocation for item in record.writes} == {embed.allocation}
    assert [(item.first_row, item.rows, item.offset_bytes, item.bytes) for item in record.writes] == [
        (5, 1, 5 * 128, 128),
        (200, 1, 200 * 128, 128),
    ]
    for name in ("uploads", "program_loads", "compiles", "allocations"):
        assert getattr(before.counters, name) == getattr(after.counters, name)
        assert getattr(record.counters, name) == 0
    assert record.counters.bytes_written == 256
    assert (after.readback, after.execution, after.binding) == ("storage", "native", "cpu")
    assert after.test_options, "a fault file is not hidden"


def test_preconditions(daemon: DaemonProcess, target: Path) -> None:
    assert refused(daemon, target="relative").reason == Reason.ARGUMENT_INVALID
    assert refused(daemon, target=str(target), plan_digest="00").reason == Reason.PLAN_CHANGED
    transition(daemon, target=str(target), request_id="r")
    assert refused(daemon, target=str(target), request_id="r", plan_digest="x").reason == Reason.REQUEST_ID_REUSED
    with pytest.raises(ClientError) as caught:
        list(daemon.client.stream(daemon.client.owner.Rollback, owner_pb2.RollbackRequest(generation=1)))
    assert caught.value.reason == Reason.GENERATION_STALE
    with pytest.raises(ClientError) as caught:
        daemon.client.call(daemon.client.owner.GetTransition, owner_pb2.GetTransitionRequest(id="nope"))
    assert caught.value.reason == Reason.NOT_FOUND
    assert owner(daemon).generation == 2


def test_an_error_is_one_error_info(still: DaemonProcess) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(still.client.owner.Transition(owner_pb2.TransitionRequest(target="/nope")))
    status = rpc_status.from_call(caught.value)
    assert status is not None
    assert status.code == grpc.StatusCode.NOT_FOUND.value[0]
    info = error_details_pb2.ErrorInfo()
    assert [detail.Unpack(info) for detail in status.details] == [True]
    assert (info.reason, info.domain) == ("TARGET_NOT_FOUND", "rowlock.v1")


def test_garbage_and_oversized_messages_do_not_hurt(still: DaemonProcess) -> None:
    before = answer(still)
    with grpc.insecure_channel(still.client.endpoint) as channel:
        for method in ("OwnerService/Transition", "OwnerService/Plan", "InferenceService/Generate"):
            for payload in (b"\xff" * 100, b"x" * (5 << 20)):
                call = channel.unary_stream(f"/rowlock.v1.{method}")
                with pytest.raises(grpc.RpcError):
                    list(call(payload))
    assert answer(still) == before


def test_a_client_that_disappears_does_not_cancel(daemon: DaemonProcess, target: Path) -> None:
    call = daemon.client.owner.Transition(owner_pb2.TransitionRequest(target=str(target), request_id="gone"))
    next(iter(call))
    call.cancel()
    events = transition(daemon, target=str(target), request_id="gone")
    assert states(events)[-1] == "PUBLISHED"
    assert owner(daemon).generation == 2


def test_a_corrupted_write_over_grpc(daemon: DaemonProcess, target: Path, fault_file: Path) -> None:
    before = answer(daemon)
    fault_file.write_text(json.dumps({"operation": "write", "effect": "flip", "bit": 3}))
    events = transition(daemon, target=str(target))
    assert states(events)[-2:] == ["ROLLING_BACK", "ROLLED_BACK"]
    assert events[-1].record.reason == "VERIFY_MISMATCH"
    assert answer(daemon) == before


def test_health_and_reflection(still: DaemonProcess) -> None:
    with grpc.insecure_channel(still.client.endpoint) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "rowlock.v1.InferenceService", "rowlock.v1.OwnerService"):
            assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == 1
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = list(reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request])))
        names = {service.name for service in answers[0].list_services_response.service}
    assert {"rowlock.v1.OwnerService", "rowlock.v1.InferenceService", "grpc.health.v1.Health"} <= names


def test_the_socket_is_private_and_the_device_has_one_owner(still: DaemonProcess, tiny: Path, tmp_path: Path) -> None:
    socket = Path(still.client.endpoint.removeprefix("unix:"))
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600
    second = rowlock(
        "serve", "--checkpoint", tiny, "--state", tmp_path / "other", "--socket", tmp_path / "s",
        ROWLOCK_RUNTIME_DIR=str(socket.parent),
    )  # fmt: skip
    assert second.code == 3
    assert f"owned by process {still.process.pid}" in second.err
    answer(still)


def test_reads_answer_while_a_transition_waits(daemon: DaemonProcess, target: Path) -> None:
    request = inference_pb2.GenerateRequest(prompt="x", max_tokens=1500, ignore_eos=True)
    running = daemon.client.inference.Generate(request)
    first = next(iter(running))
    events: list[owner_pb2.TransitionEvent] = []
    mover = threading.Thread(target=lambda: events.extend(transition(daemon, target=str(target))))
    mover.start()
    while not owner(daemon).transition:
        pass
    assert owner(daemon).state == owner_pb2.OWNER_STATE_TRANSITIONING
    assert owner(daemon).identity == first.identity
    messages = list(running)
    mover.join()
    assert {message.identity.digest for message in messages} == {first.identity.digest}
    assert states(events)[-1] == "PUBLISHED"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_in_order(daemon: DaemonProcess, number: signal.Signals) -> None:
    running = daemon.client.inference.Generate(
        inference_pb2.GenerateRequest(prompt="x", max_tokens=1500, ignore_eos=True)
    )
    next(iter(running))
    daemon.process.send_signal(number)
    with pytest.raises(grpc.RpcError) as caught:
        list(running)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert daemon.process.wait(20) == 0
    assert not Path(daemon.client.endpoint.removeprefix("unix:")).exists()


def test_a_killed_daemon_starts_again_on_what_was_published(daemon: DaemonProcess, target: Path, tiny: Path) -> None:
    transition(daemon, target=str(target))
    tokens = answer(daemon)
    daemon.process.kill()
    daemon.process.wait()
    state = target.parent / "state"
    with DaemonProcess(state, ["--checkpoint", str(tiny)]) as again:
        assert answer(again) == tokens
        assert owner(again).generation == 2


# The command line.


def test_commands_in_text_and_json(daemon: DaemonProcess, tiny: Path, target: Path) -> None:
    endpoint = daemon.client.endpoint
    status = rowlock("status", endpoint=endpoint)
    assert status.code == 0
    assert status.out.startswith("cpu: READY")
    plan = rowlock("plan", "--target", target, "--json", endpoint=endpoint)
    assert plan.json["level"] == "B2"
    assert plan.json["rows_max"] > 0
    assert rowlock("plan", "--target", target, endpoint=endpoint).out.startswith("B2: 1 tensors differ")
    done = rowlock("transition", "--target", target, "--plan-digest", plan.json["digest"], endpoint=endpoint)
    assert done.code == 0
    assert done.out.startswith("PUBLISHED: transition ")
    assert "JOURNALED" in done.err
    assert "JOURNALED" not in done.out
    back = rowlock("rollback", "--json", "--quiet", endpoint=endpoint)
    assert (back.code, back.err) == (0, "")
    assert [line["state"] for line in back.json_lines][-1] == "PUBLISHED"
    assert back.json_lines[-1]["record"]["rows_written"] == 2
    history = rowlock("history", "--json", endpoint=endpoint).json
    assert [item["kind"] for item in history] == ["rollback", "transition", "load"]
    one = rowlock("history", history[0]["id"], endpoint=endpoint)
    assert "PUBLISHED" in one.out
    verify = rowlock("verify", "--json", endpoint=endpoint)
    assert (verify.code, verify.json["ok"]) == (0, True)
    text = rowlock("generate", "hello", "--max-tokens", 4, "--ignore-eos", endpoint=endpoint)
    assert text.code == 0
    assert "generation 3" in text.err
    assert rowlock("describe", "--json", endpoint=endpoint).json["owner"]["generation"] == 3
    assert "TEST OPTION" in rowlock("describe", endpoint=endpoint).out
    assert rowlock("status", "--endpoint", endpoint, "--json").json["generation"] == 3


def test_exit_codes(daemon: DaemonProcess, tiny: Path, target: Path, tmp_path: Path, fault_file: Path) -> None:
    endpoint = daemon.client.endpoint
    assert rowlock("transition", endpoint=endpoint).code == 2
    refused = rowlock("transition", "--target", tmp_path / "nope", "--json", endpoint=endpoint)
    assert refused.code == 3
    assert refused.json["error"]["reason"] == "TARGET_NOT_FOUND"
    assert "try:" in refused.err
    fault_file.write_text(json.dumps({"operation": "write", "effect": "flip"}))
    assert rowlock("transition", "--target", target, endpoint=endpoint).code == 4
    fault_file.write_text(json.dumps({"operation": "read", "effect": "flip", "skip": 1}))
    drift = rowlock("verify", endpoint=endpoint)
    assert drift.code == 7
    assert "differs:" in drift.out
    fault_file.write_text(json.dumps({"operation": "write", "effect": "flip", "count": 10**6}))
    assert rowlock("transition", "--target", target, endpoint=endpoint).code == 5
    assert rowlock("generate", "x", endpoint=endpoint).code == 3
    assert rowlock("status", endpoint=f"unix:{tmp_path}/none.sock").code == 8
    fault_file.unlink(missing_ok=True)
    assert rowlock("transition", "--target", target, endpoint=endpoint).code == 0


def test_timeout_and_interrupt_detach_without_cancelling(daemon: DaemonProcess, target: Path, tiny: Path) -> None:
    endpoint = daemon.client.endpoint
    request = inference_pb2.GenerateRequest(prompt="x", max_tokens=1900, ignore_eos=True)
    running = daemon.client.inference.Generate(request)
    next(iter(running))
    late = rowlock("transition", "--target", target, "--timeout", 0.05, endpoint=endpoint)
    assert late.code == 8
    assert "rowlock history" in late.err
    list(running)
    while owner(daemon).transition:
        pass
    running = daemon.client.inference.Generate(request)
    next(iter(running))
    process = subprocess.Popen(
        [sys.executable, "-m", "rowlock.cli", "transition", "--target", str(tiny), "--endpoint", endpoint],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not owner(daemon).transition and process.poll() is None:
        pass
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    list(running)
    assert process.returncode in {0, 130}
    if process.returncode == 130:
        assert "goes on" in err
    while owner(daemon).transition:
        pass
    assert owner(daemon).checkpoint == str(tiny)


def test_manifest_needs_no_daemon(tiny: Path, tmp_path: Path) -> None:
    directory = copy(tiny, tmp_path / "m")
    first = rowlock("manifest", directory, "--json")
    assert first.code == 0
    assert (directory / ".rowlock" / "manifest.safetensors").exists()
    assert rowlock("manifest", directory, "--no-write", "--json").json == first.json
    assert rowlock("manifest", tmp_path / "nope").code == 3
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(directory), "--threads", "1"]) as daemon:
        assert owner(daemon).identity.digest == first.json["identity"]["digest"]
