"""The five owner operations (describe, identity, plan, apply, generate) through gRPC, on the device of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import EMBED, Q0, change_rows, negate
from support.daemons import owner, transition
from support.devices import device_of_owners
from support.reference import cpu_tokens

from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import inference_pb2, owner_pb2

PROMPT = tuple(b"once upon a time")
TOKENS = 8


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[DaemonProcess]:
    """One daemon for the module: each test leaves it on the base checkpoint."""
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), options(tiny), device_of_owners().environment()) as process:
        yield process


def options(checkpoint: Path) -> list[str]:
    """Of a daemon on the device of the run."""
    settings = device_of_owners().settings
    found = ["--checkpoint", str(checkpoint), "--threads", "1", "--device", settings["device"]]
    return [*found, "--without-hardware"] if settings.get("without_hardware") else found


@pytest.fixture
def target(tiny: Path, tmp_path: Path) -> Path:
    return change_rows(change_rows(tiny, tmp_path / "t", EMBED, [5, 200], negate), tmp_path / "u", Q0, [3], negate)


def describe(daemon: DaemonProcess) -> owner_pb2.DescribeResponse:
    return daemon.client.call(daemon.client.owner.Describe, owner_pb2.DescribeRequest())


def generate(daemon: DaemonProcess) -> list[int]:
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=PROMPT), max_tokens=TOKENS, ignore_eos=True
    )
    return [
        token for message in daemon.client.stream(daemon.client.inference.Generate, request) for token in message.tokens
    ]


def answer(daemon: DaemonProcess, directory: Path) -> list[int]:
    """The device's answer, which is the CPU binding's where they compute alike."""
    tokens = generate(daemon)
    assert len(tokens) == TOKENS
    if device_of_owners().bits_of_cpu:
        assert tokens == cpu_tokens(directory, PROMPT, TOKENS)
    return tokens


def roll_back(daemon: DaemonProcess) -> owner_pb2.TransitionRecord:
    request = owner_pb2.RollbackRequest()
    return list(daemon.client.stream(daemon.client.owner.Rollback, request))[-1].event.record


def test_describe(daemon: DaemonProcess) -> None:
    said, device = describe(daemon), device_of_owners().settings["device"]
    assert (said.owner.device, said.binding) == (device, device.partition(":")[0])
    assert said.logical_device
    assert said.readback in {"storage", "unproven"}
    assert said.execution in {"native", "reference", "host-reference"}
    assert said.versions["torch"]
    assert len({parent.allocation for parent in said.parents}) == len(said.parents) > 0


def test_identity_and_generate(daemon: DaemonProcess, tiny: Path) -> None:
    assert owner(daemon).identity.digest
    assert answer(daemon, tiny) == answer(daemon, tiny)


def test_a_plan_changes_nothing(daemon: DaemonProcess, target: Path) -> None:
    before = owner(daemon), describe(daemon).counters
    plan = daemon.client.call(daemon.client.owner.Plan, owner_pb2.PlanRequest(target=str(target))).plan
    assert plan.level == owner_pb2.LEVEL_B2, plan.why
    assert {change.tensor for change in plan.changes} == {EMBED, Q0}
    assert (owner(daemon), describe(daemon).counters) == before


def test_apply_changes_rows_and_nothing_else(daemon: DaemonProcess, tiny: Path, target: Path) -> None:
    before, identity, old = describe(daemon), owner(daemon).identity, answer(daemon, tiny)
    record = transition(daemon, target=str(target))[-1].record
    after = describe(daemon)
    assert record.state == owner_pb2.TRANSITION_STATE_PUBLISHED, record.message
    assert (record.level, record.rows_written, record.readback) == (owner_pb2.LEVEL_B2, 3, before.readback)
    assert {(item.parent, item.first_row, item.rows) for item in record.writes} == {
        ("embed", 5, 1),
        ("embed", 200, 1),
        ("0.qkv", 3, 1),
    }
    assert {item.name: item.allocation for item in after.parents} == {
        item.name: item.allocation for item in before.parents
    }
    for name in ("uploads", "program_loads", "compiles", "allocations"):
        assert getattr(after.counters, name) == getattr(before.counters, name), f"a B2 changed {name}"
    assert (after.owner.identity.program, after.programs) == (identity.program, before.programs)
    assert answer(daemon, target) != old
    assert daemon.client.call(daemon.client.owner.Verify, owner_pb2.VerifyRequest()).ok
    assert roll_back(daemon).state == owner_pb2.TRANSITION_STATE_PUBLISHED
    assert owner(daemon).identity == identity
    assert answer(daemon, tiny) == old


def test_rows_in_place_answer_like_a_fresh_load(daemon: DaemonProcess, tiny: Path, target: Path) -> None:
    record = transition(daemon, target=str(target), require=owner_pb2.REQUIRE_B1)[-1].record
    assert (record.state, record.level) == (owner_pb2.TRANSITION_STATE_PUBLISHED, owner_pb2.LEVEL_B1), record.message
    assert record.counters.allocations == record.counters.uploads == len(describe(daemon).parents)
    fresh = answer(daemon, target)
    assert transition(daemon, target=str(tiny))[-1].record.level == owner_pb2.LEVEL_B2
    assert answer(daemon, tiny) != fresh
    assert transition(daemon, target=str(target))[-1].record.level == owner_pb2.LEVEL_B2
    assert answer(daemon, target) == fresh
    assert transition(daemon, target=str(tiny))[-1].record.state == owner_pb2.TRANSITION_STATE_PUBLISHED


IMPORT = {"cpu", "cuda"}
"""Devices that take in K/V of another."""


def test_a_prompt_that_a_source_computes_is_answered_like_any_other_or_refused_at_the_start(
    tmp_path: Path, tiny: Path
) -> None:
    device = device_of_owners()
    remote = [*options(tiny), "--prefill", "subprocess", "--prefill-stream-layers", "1"]
    if device.settings["device"].partition(":")[0] not in IMPORT:
        with (
            pytest.raises(ClientError, match="cannot import K/V"),
            DaemonProcess(tmp_path, remote, device.environment()),
        ):
            pass
        return
    with DaemonProcess(tmp_path, remote, device.environment()) as daemon:
        assert answer(daemon, tiny) == answer(daemon, tiny)
        source = owner(daemon).source
        assert (source.prompts_imported, source.prompts_failed, source.local_fallbacks) == (2, 0, 0)
