"""Compiled graphs on ATOM, over a double of rebel-compiler: levels, reuse of what is parsed, whole requests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from support.checkpoints import write_artifact
from support.devices import DEVICES, device_of_owners
from support.owners import OwnerHarness, running_owner

from rowlock.bindings.atom.artifacts import ParsedGraphs
from rowlock.bindings.checkpoint.artifacts import ArtifactDirectory
from rowlock.bindings.device import Counters, DeviceError, DeviceFault, Variant
from rowlock.bindings.plan import Require
from rowlock.daemon.owner.states import OwnerState
from rowlock.v1.errors import OwnerError, Reason

pytestmark = pytest.mark.skipif(
    device_of_owners() is not DEVICES["atom"], reason="ATOM: run `make test-atom`, which has torch-rbln"
)
PROMPT = tuple(b"hello")


@pytest.fixture
def graphs(rebel: ModuleType, tmp_path: Path, base: Path) -> Iterator[OwnerHarness]:
    with running_owner(tmp_path / "state", base) as owner:
        yield owner


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 13])
def test_prompts_go_in_chunks_and_answers_token_by_token(graphs: OwnerHarness, rebel: ModuleType, length: int) -> None:
    prompt = tuple(range(1, length + 1))
    assert graphs.ask(prompt, 6).wait() == rebel.answer(b"base", prompt, 6)


def test_a_request_owns_the_graphs_from_its_first_token_to_its_last(graphs: OwnerHarness, rebel: ModuleType) -> None:
    """Their K/V is one: were two requests to take turns, each would see the other's tokens."""
    prompts = [tuple(range(start, start + 6)) for start in (10, 20, 30)]
    answers = [graphs.ask(prompt, 20) for prompt in prompts]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.wait() == rebel.answer(b"base", prompt, 20)
    assert rebel.Runtime.most == 2, "the same two graphs served them all"


def test_a_warmup_of_several_requests_comes_to_its_end(rebel: ModuleType, tmp_path: Path, base: Path) -> None:
    """One of them owns the graphs: the next has its turn once it is closed."""
    with running_owner(tmp_path / "state", base, variants=(Variant(3, 6),), warmup=True) as owner:
        assert owner.owner.view.state is OwnerState.READY
        assert owner.ask(PROMPT, 5).wait() == rebel.answer(b"base", PROMPT, 5)
        assert owner.owner.prepare_variant(Variant(2, 5)).result(60).parses == 0


def test_a_request_that_gives_up_leaves_the_graphs_to_the_next(graphs: OwnerHarness, rebel: ModuleType) -> None:
    first = graphs.ask(PROMPT, 50)
    first.wait_token()
    graphs.core.scheduler.fail_all(OwnerError(Reason.CANCELLED, "gave up"))
    assert graphs.ask(PROMPT, 5).wait() == rebel.answer(b"base", PROMPT, 5)


def test_a_request_beyond_the_compiled_context_is_refused(graphs: OwnerHarness) -> None:
    with pytest.raises(OwnerError, match="exceed the context of 64") as caught:
        graphs.ask(PROMPT, 60).wait()
    assert caught.value.reason is Reason.CONTEXT_EXCEEDED


def test_the_plan_is_a_reload_and_says_why(graphs: OwnerHarness, tmp_path: Path) -> None:
    target = write_artifact(tmp_path / "t", b"other")
    with pytest.raises(OwnerError, match="B1_ONLY_BINDING") as caught:
        graphs.transition(target, Require.B2)
    assert caught.value.reason is Reason.PLAN_REFUSED
    record = graphs.transition(target)
    assert (record.state, record.level, record.readback) == ("PUBLISHED", "B1", "unproven")
    assert [item["reason"] for item in record.plan["blockers"]] == ["B1_ONLY_BINDING"]


def test_the_old_graphs_leave_the_device_before_the_new_ones_come(
    graphs: OwnerHarness, rebel: ModuleType, tmp_path: Path
) -> None:
    answer = graphs.ask(PROMPT, 8).wait()
    record = graphs.transition(write_artifact(tmp_path / "t", b"other"))
    assert rebel.Runtime.most == 2
    assert (record.counters["parses"], record.counters["program_loads"]) == (2, 2)
    assert record.counters["parse_us"] > 0
    assert graphs.ask(PROMPT, 8).wait() == rebel.answer(b"other", PROMPT, 8) != answer
    assert graphs.rollback().level == "B1"
    assert graphs.ask(PROMPT, 8).wait() == answer


def test_unchanged_graphs_are_not_parsed_again(graphs: OwnerHarness, rebel: ModuleType, base: Path) -> None:
    copy = shutil.copytree(base, base.parent / "copy")
    record = graphs.transition(copy, Require.B1)
    assert (record.state, record.counters["parses"], record.counters["program_loads"]) == ("PUBLISHED", 0, 2)
    assert record.counters["create_us"] > 0
    assert rebel.Runtime.most == 2
    assert graphs.ask(PROMPT, 8).wait() == rebel.answer(b"base", PROMPT, 8)


def test_only_the_graph_that_changed_is_parsed_again(graphs: OwnerHarness, base: Path) -> None:
    copy = shutil.copytree(base, base.parent / "copy")
    (copy / "prefill.rbln").write_bytes(b"prefill of another build\nbase")
    assert graphs.transition(copy).counters["parses"] == 1


def test_other_settings_are_parsed_again(graphs: OwnerHarness, tmp_path: Path) -> None:
    target = write_artifact(tmp_path / "t", b"base", kvcache_num_blocks=8)
    record = graphs.transition(target)
    assert (record.state, record.counters["parses"]) == ("PUBLISHED", 2)


@pytest.mark.parametrize("weights", [b"too large", b"other"], ids=["does not fit", "cannot be parsed"])
def test_graphs_that_cannot_be_loaded_leave_the_old_ones(
    graphs: OwnerHarness, rebel: ModuleType, tmp_path: Path, weights: bytes
) -> None:
    identity, target = graphs.identity, write_artifact(tmp_path / "t", weights)
    if weights == b"other":
        (target / "decoder_batch_1.rbln").write_bytes(b"broken")
    record = graphs.transition(target)
    assert (record.state, record.reason) == ("ROLLED_BACK", "DEVICE_FAILED")
    assert graphs.identity == identity
    assert rebel.Runtime.most == 2, "what was created before the failure is gone before the old graphs come back"
    assert graphs.ask(PROMPT, 8).wait() == rebel.answer(b"base", PROMPT, 8)


def test_from_rows_to_graphs_and_back(rebel: ModuleType, tmp_path: Path, tiny: Path, base: Path) -> None:
    with running_owner(tmp_path / "state", tiny) as owner:
        answer = owner.tokens()
        assert owner.owner.view.facts.execution == "host-reference"
        assert owner.transition(base).level == "B1"
        assert owner.owner.view.facts.execution == "native"
        assert owner.ask(PROMPT, 8).wait() == rebel.answer(b"base", PROMPT, 8)
        assert owner.verify().ok
        assert owner.rollback().level == "B1"
        assert owner.tokens() == answer


def test_a_restart_loads_the_graphs_again(rebel: ModuleType, tmp_path: Path, base: Path) -> None:
    with running_owner(tmp_path / "state", base) as owner:
        identity = owner.identity
    with running_owner(tmp_path / "state", None) as owner:
        assert owner.identity == identity
        assert owner.ask(PROMPT, 8).wait() == rebel.answer(b"base", PROMPT, 8)


def test_a_file_that_was_exchanged_after_it_was_hashed_is_refused(rebel: ModuleType, base: Path) -> None:
    found = ArtifactDirectory.find(base)
    assert found is not None
    with_other_file = replace(found.artifact.graphs[0], stamp=found.artifact.graphs[1].stamp)
    with pytest.raises(DeviceError, match="is not the file any more") as caught:
        ParsedGraphs(Counters()).get(with_other_file, found.artifact.revision)
    assert caught.value.fault is DeviceFault.CORRUPT
    found.close()


def test_closing_frees_the_host_objects(rebel: ModuleType, base: Path) -> None:
    found, parsed = ArtifactDirectory.find(base), ParsedGraphs(Counters())
    assert found is not None
    before = rebel.RBLNCompiledModel.live
    for graph in found.artifact.graphs:
        parsed.get(graph, found.artifact.revision)
    assert rebel.RBLNCompiledModel.live == before + 2
    parsed.close()
    assert rebel.RBLNCompiledModel.live == before
    found.close()
