"""The real daemon in reference execution: what it says of itself, and that its answers are the CPU binding's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows
from support.daemons import owner, states, transition
from support.devices import RNGD, device_of_owners
from support.reference import cpu_tokens
from support.rngd import digests, negate_f32

from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import inference_pb2, owner_pb2

PROMPT = tuple(b"once upon a time")
TOKENS = 12


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[DaemonProcess]:
    options = ["--checkpoint", str(base), "--device", RNGD["device"], "--without-hardware"]
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), options, device_of_owners().environment()) as process:
        yield process


def describe(daemon: DaemonProcess) -> owner_pb2.DescribeResponse:
    return daemon.client.call(daemon.client.owner.Describe, owner_pb2.DescribeRequest())


def generate(daemon: DaemonProcess) -> list[int]:
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=PROMPT), max_tokens=TOKENS, ignore_eos=True
    )
    return [
        token for message in daemon.client.stream(daemon.client.inference.Generate, request) for token in message.tokens
    ]


def test_it_says_what_it_is(daemon: DaemonProcess) -> None:
    said = describe(daemon)
    assert (said.owner.device, said.logical_device, said.binding) == ("rngd:1", "reference", "rngd")
    assert (said.execution, said.readback, list(said.test_options)) == ("reference", "storage", [])
    assert said.versions["furiosa-torch"] == "2026.4.0"
    assert set(said.programs) == {"decoder-1x256", "decoder-64x256"}
    assert len(set(said.programs.values())) == 2


def test_tokens_rows_rollback_and_reload(daemon: DaemonProcess, base: Path, programs: Path, tmp_path: Path) -> None:
    """The whole way, once, through gRPC."""
    before, artifacts, old = describe(daemon), digests(programs), generate(daemon)
    assert old == cpu_tokens(base, PROMPT, TOKENS)
    assert describe(daemon).counters.executions - before.counters.executions == TOKENS
    target = change_rows(base, tmp_path / "target", EMBED, sorted(set(old)), negate_f32)
    events = transition(daemon, target=str(target))
    assert states(events)[-1] == "PUBLISHED"
    record = events[-1].record
    assert (record.level, record.rows_written, record.readback) == (owner_pb2.LEVEL_B2, len(set(old)), "storage")
    after, new = describe(daemon), generate(daemon)
    assert after.programs == before.programs
    assert artifacts.items() <= digests(programs).items(), "compiled artifacts changed"
    for name in ("compiles", "program_loads", "allocations", "uploads"):
        assert getattr(record.counters, name) == 0, name
    assert new == cpu_tokens(target, PROMPT, TOKENS) != old
    reload = transition(daemon, target=str(target), require=owner_pb2.REQUIRE_B1)[-1].record
    assert (reload.state, reload.level) == (owner_pb2.TRANSITION_STATE_PUBLISHED, owner_pb2.LEVEL_B1)
    assert (reload.counters.compiles, reload.counters.program_loads) == (0, 2)
    assert generate(daemon) == new, "rows in place answer like a fresh load"
    back = transition(daemon, target=str(base))[-1].record
    assert back.level == owner_pb2.LEVEL_B2
    assert (generate(daemon), owner(daemon).identity) == (old, before.owner.identity)
    back = list(daemon.client.stream(daemon.client.owner.Rollback, owner_pb2.RollbackRequest()))[-1].event.record
    assert (back.state, back.level) == (owner_pb2.TRANSITION_STATE_PUBLISHED, owner_pb2.LEVEL_B2)
    assert generate(daemon) == new
    assert artifacts.items() <= digests(programs).items()
    assert daemon.client.call(daemon.client.owner.Verify, owner_pb2.VerifyRequest()).ok
