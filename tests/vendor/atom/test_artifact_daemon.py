"""Compiled graphs on the real daemon, over gRPC: what it says of them, what a reload costs, whose requests they serve.

The double of rebel-compiler stands in the daemon's process; everything else is what a user runs.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from support.checkpoints import write_artifact
from support.daemons import owner, refused, transition
from support.devices import ATOM, DEVICES, device_of_owners
from support.standin import DOUBLE

from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import inference_pb2, owner_pb2

pytestmark = pytest.mark.skipif(
    device_of_owners() is not DEVICES["atom"], reason="ATOM: run `make test-atom`, which has torch-rbln"
)
PROMPT = tuple(b"hello")
TOKENS = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artifact(tmp_path_factory.mktemp("graphs") / "base", b"base")


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[DaemonProcess]:
    options = ["--checkpoint", str(base), "--device", ATOM["device"], "--without-hardware"]
    environment = {**device_of_owners().environment(), "PYTHONPATH": str(DOUBLE)}
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), options, environment) as process:
        yield process


@pytest.fixture
def daemon(serving: DaemonProcess, base: Path) -> Iterator[DaemonProcess]:
    """The daemon of the module, with the base graphs resident before and after."""
    yield serving
    if describe(serving).programs != graph_hashes(base):
        assert transition(serving, target=str(base))[-1].record.state == owner_pb2.TRANSITION_STATE_PUBLISHED


def describe(daemon: DaemonProcess) -> owner_pb2.DescribeResponse:
    return daemon.client.call(daemon.client.owner.Describe, owner_pb2.DescribeRequest())


def plan(daemon: DaemonProcess, target: Path) -> owner_pb2.Plan:
    return daemon.client.call(daemon.client.owner.Plan, owner_pb2.PlanRequest(target=str(target))).plan


def move(daemon: DaemonProcess, target: Path, **fields: object) -> owner_pb2.TransitionRecord:
    """A transition that publishes; its record as the daemon tells it afterwards."""
    events = transition(daemon, target=str(target), **fields)
    assert events[-1].record.state == owner_pb2.TRANSITION_STATE_PUBLISHED, events[-1].record.message
    request = owner_pb2.GetTransitionRequest(id=events[-1].record.id)
    return daemon.client.call(daemon.client.owner.GetTransition, request).record


def generate(daemon: DaemonProcess, prompt: tuple[int, ...] = PROMPT) -> tuple[list[int], str]:
    """Tokens, and the identity that every part of the answer carries."""
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=prompt), max_tokens=TOKENS, ignore_eos=True
    )
    messages = list(daemon.client.stream(daemon.client.inference.Generate, request))
    (identity,) = {message.identity.digest for message in messages}
    return [token for message in messages for token in message.tokens], identity


def graph_hashes(directory: Path) -> dict[str, str]:
    return {path.stem: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.glob("*.rbln")}


def test_it_says_what_it_runs(daemon: DaemonProcess, base: Path) -> None:
    said = describe(daemon)
    assert (said.owner.device, said.logical_device, said.execution) == ("atom:1", "rbln:0", "native")
    assert (said.readback, list(said.parents), said.resident_bytes) == ("unproven", [], 0)
    assert dict(said.programs) == graph_hashes(base), "each graph by the SHA-256 of its whole file"
    assert said.context_tokens == 64


@pytest.mark.parametrize("change", ["graph", "settings"])
def test_the_identity_is_that_of_every_byte_and_of_the_settings(
    daemon: DaemonProcess, base: Path, tmp_path: Path, change: str
) -> None:
    target = shutil.copytree(base, tmp_path / "t")
    if change == "graph":
        graph = target / "decoder_batch_1.rbln"
        graph.write_bytes(graph.read_bytes()[:-1] + b"\0")
    else:
        shutil.rmtree(target)
        write_artifact(target, b"base", kvcache_num_blocks=8)
    before, planned = owner(daemon).identity, plan(daemon, target)
    assert planned.to.program != before.program
    assert (planned.to.assets, planned.to.weights) == (before.assets, before.weights)
    assert planned.level == owner_pb2.LEVEL_B1
    assert [item.reason for item in planned.blockers] == ["B1_ONLY_BINDING"]


def test_prompts_computed_elsewhere_are_refused_at_the_start(base: Path, tmp_path: Path) -> None:
    options = ["--checkpoint", str(base), "--device", ATOM["device"], "--without-hardware", "--prefill", "subprocess"]
    environment = {**device_of_owners().environment(), "PYTHONPATH": str(DOUBLE)}
    daemon = DaemonProcess(tmp_path / "state", options, environment)
    with pytest.raises(ClientError, match=r"cannot import K/V.*--prefill none"), daemon:
        pass


def test_rows_in_place_are_refused_and_nothing_has_happened(daemon: DaemonProcess, tmp_path: Path) -> None:
    before = describe(daemon)
    error = refused(daemon, target=str(write_artifact(tmp_path / "t", b"other")), require=owner_pb2.REQUIRE_B2)
    assert "B1_ONLY_BINDING" in str(error)
    assert (describe(daemon).counters, owner(daemon).generation) == (before.counters, before.owner.generation)


def test_other_graphs_are_parsed_and_created_and_the_record_says_how_often_and_how_long(
    daemon: DaemonProcess, rebel: ModuleType, tmp_path: Path
) -> None:
    answer, identity = generate(daemon)
    assert answer == rebel.answer(b"base", PROMPT, TOKENS)
    record = move(daemon, write_artifact(tmp_path / "t", b"other"))
    assert (record.level, record.readback) == (owner_pb2.LEVEL_B1, "unproven")
    assert (record.counters.parses, record.counters.program_loads) == (2, 2)
    assert record.counters.parse_us > 0
    assert record.counters.create_us > 0
    other, other_identity = generate(daemon)
    assert other == rebel.answer(b"other", PROMPT, TOKENS) != answer
    assert other_identity == record.to.digest != identity


def test_unchanged_graphs_are_created_again_without_being_parsed(
    daemon: DaemonProcess, rebel: ModuleType, base: Path, tmp_path: Path
) -> None:
    record = move(daemon, shutil.copytree(base, tmp_path / "copy"), require=owner_pb2.REQUIRE_B1)
    assert (record.counters.parses, record.counters.parse_us, record.counters.program_loads) == (0, 0, 2)
    assert record.counters.create_us > 0
    assert generate(daemon)[0] == rebel.answer(b"base", PROMPT, TOKENS)


def test_of_two_graphs_the_changed_one_is_parsed(daemon: DaemonProcess, base: Path, tmp_path: Path) -> None:
    target = shutil.copytree(base, tmp_path / "t")
    (target / "prefill.rbln").write_bytes(b"prefill of another build\nbase")
    record = move(daemon, target)
    assert (record.counters.parses, record.counters.program_loads) == (1, 2)


def test_the_same_graphs_serve_request_after_request(daemon: DaemonProcess, rebel: ModuleType) -> None:
    """Nothing is parsed or created for a request, and none sees what the one before it left."""
    before = describe(daemon).counters
    for start in range(4):
        prompt = tuple(range(start + 1, start + 7))
        assert generate(daemon, prompt)[0] == rebel.answer(b"base", prompt, TOKENS)
    after = describe(daemon).counters
    assert (after.parses, after.program_loads) == (before.parses, before.program_loads)


def test_requests_at_the_same_time_own_the_graphs_one_after_another(daemon: DaemonProcess, rebel: ModuleType) -> None:
    prompts = [tuple(range(start, start + 9)) for start in (10, 30, 50, 70)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(lambda prompt: generate(daemon, prompt)[0], prompts))
    assert answers == [rebel.answer(b"base", prompt, TOKENS) for prompt in prompts]


def test_a_rollback_is_a_reload_of_the_graphs_before(daemon: DaemonProcess, rebel: ModuleType, tmp_path: Path) -> None:
    identity = owner(daemon).identity
    move(daemon, write_artifact(tmp_path / "t", b"other"))
    events = list(daemon.client.stream(daemon.client.owner.Rollback, owner_pb2.RollbackRequest()))
    record = events[-1].event.record
    assert (record.state, record.level) == (owner_pb2.TRANSITION_STATE_PUBLISHED, owner_pb2.LEVEL_B1)
    assert owner(daemon).identity == identity
    assert generate(daemon)[0] == rebel.answer(b"base", PROMPT, TOKENS)
