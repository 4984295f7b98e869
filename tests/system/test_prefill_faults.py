"""A source that does wrong: its prompts fail, each with the reason and in good time, and nobody else notices."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.owners import Answer
from support.prefilling import PROMPTS, Gate, Remote, Survivor, fails, local_answers, order, remote_owner, slow_down

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.importing import DecoderImport
from rowlock.daemon.prefill import keeper as keeper_module
from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.v1.errors import Reason

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> dict[str, list[int]]:
    return local_answers(tmp_path_factory.mktemp("local") / "state", tiny)


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("orders") / "orders.json"


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory, tiny: Path, orders: Path) -> Iterator[Remote]:
    """An owner that streams two layers one by one, from a source that does wrong when it is told to."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", str(TESTS))
    patch.setattr(keeper_module, "BACKOFF_S", (0.0,))
    source = {"factory": "support.saboteur:create", "extra": {"orders": str(orders)}, "silence_s": 2.0}
    state = tmp_path_factory.mktemp("faulty") / "state"
    try:
        with remote_owner(state, tiny, source, mode=Mode.STREAM, layers_per_span=1) as remote:
            yield remote
    finally:
        patch.undo()


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take so long that a request outlasts the patience with a silent source."""
    slow_down(monkeypatch)


def asked_before(faulty: Remote, orders: Path, fault: str, at: int) -> tuple[Answer, Answer, Answer]:
    """Three prompts that are all asked for before a fault comes, to the second: the source is held up in the first."""
    gate = Gate(orders)
    gate.close_at(at)
    held = faulty.ask(PROMPTS[2], 24)
    gate.wait()
    failed, other = faulty.ask("hello", 24), faulty.ask(PROMPTS[1], 24)
    faulty.until(lambda view: view.live == 3)
    order(orders, fault, at)
    gate.open()
    return held, failed, other


OWN_FAULTS = {
    "drop": (0, "done.spans is 2, wanted 1"),
    "duplicate": (0, "overlap"),
    "overlap": (0, "overlap"),
    "layer out of bounds": (0, "span.layer_stop is 1001"),
    "token out of bounds": (0, "positions 0 to 6"),
    "wrong dtype": (0, "span.dtype is 3"),
    "wrong shape": (0, "span.kv_heads is 3"),
    "wrong generation": (0, "span.generation is 2"),
    "early done": (1, "done came before everything was there: layer 1 has 0 of 5 positions"),
    "error": (0, "the device is tired"),
}
"""Faults that fail one prompt; the source goes on. At which span each happens, and what is said of it."""


@pytest.mark.parametrize("fault", OWN_FAULTS)
def test_a_span_that_cannot_be_right_fails_its_request_alone(
    faulty: Remote, orders: Path, expected: dict[str, list[int]], fault: str
) -> None:
    at, words = OWN_FAULTS[fault]
    survivor = Survivor(faulty, expected)
    before = faulty.view
    order(orders, fault, at)
    failed, other = faulty.ask("hello", 24), faulty.ask(PROMPTS[1], 24)
    error = fails(failed)
    survivor.still_runs()
    assert error.reason is Reason.SOURCE_FAILED
    assert words in str(error)
    assert other.wait() == expected[PROMPTS[1]]
    assert faulty.ask("hello", 24).wait() == expected["hello"]
    survivor.check()
    faulty.settle()
    after = faulty.view
    assert (after.pid, after.counters.failed) == (before.pid, before.counters.failed + 1)


@pytest.mark.usefixtures("slow_steps")
def test_a_span_under_the_number_of_another_live_request_fails_both_and_nobody_else(
    faulty: Remote, orders: Path, expected: dict[str, list[int]]
) -> None:
    survivor = Survivor(faulty, expected)
    held, failed, other = asked_before(faulty, orders, "another's request", 0)
    assert held.wait() == expected[PROMPTS[2]]
    assert {fails(answer).reason for answer in (failed, other)} == {Reason.SOURCE_FAILED}
    survivor.still_runs()
    assert faulty.ask("hello", 24).wait() == expected["hello"]
    survivor.check()
    faulty.settle()


def test_two_live_requests_under_one_id_are_two_requests(faulty: Remote, expected: dict[str, list[int]]) -> None:
    """Whatever their clients call them. On the link each has a number of its own."""
    survivor = Survivor(faulty, expected)
    answers = [faulty.ask(prompt, 24) for prompt in PROMPTS]
    assert [answer.wait() for answer in answers] == [expected[prompt] for prompt in PROMPTS]
    survivor.check()
    faulty.settle()


@pytest.mark.usefixtures("slow_steps")
def test_a_number_that_is_live_already_ends_the_source_and_nobody_else(
    faulty: Remote, orders: Path, expected: dict[str, list[int]]
) -> None:
    survivor = Survivor(faulty, expected)
    gate, before = Gate(orders), faulty.view
    gate.close_at(0)
    failed = faulty.ask("hello", 24)
    gate.wait()
    (item,) = faulty.prefiller._live.values()
    keeper = faulty.prefiller._keeper
    keeper.send(faulty.prefiller._order(item))
    while keeper._outbox.first() is not None:
        time.sleep(0.005)
    gate.open()
    error = fails(failed)
    assert (error.reason, "closed its end" in str(error)) == (Reason.SOURCE_FAILED, True)
    survivor.still_runs()
    survivor.check()
    assert faulty.ready().restarts == before.restarts + 1
    assert faulty.ask("hello", 24).wait() == expected["hello"]
    faulty.settle()


def test_a_second_done_changes_nothing(faulty: Remote, orders: Path, expected: dict[str, list[int]]) -> None:
    survivor = Survivor(faulty, expected)
    late = faulty.view.counters.late
    order(orders, "two dones", None)
    assert faulty.ask("hello", 24).wait() == expected["hello"]
    survivor.check()
    faulty.until(lambda view: view.counters.late == late + 1)
    faulty.settle()


ENDING_FAULTS = {
    "die": "closed its end",
    "stop": "said nothing of the prompt that it has for 2.0 s",
    "truncated": "header.length: 53 bytes, not 56",
    "oversized": "a packet of more than 131072 bytes",
    "unknown": "kind is 77, which there is not",
    "nonsense": "is not one of this protocol",
    "an owner's frame": "sent release, which only an owner does",
    "wrong request": "which it was never asked for",
}
OFTEN = {("die", 1), ("stop", 1), ("unknown", 0), ("wrong request", 1)}


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize(
    ("fault", "at"),
    [
        pytest.param(fault, at, marks=() if (fault, at) in OFTEN else pytest.mark.campaign)
        for fault in ENDING_FAULTS
        for at in (0, 1)
    ],
)
def test_a_source_that_ends_loses_its_prompts_and_is_started_again(
    faulty: Remote, orders: Path, expected: dict[str, list[int]], fault: str, at: int
) -> None:
    survivor = Survivor(faulty, expected)
    before = faulty.view
    held, failed, ahead = asked_before(faulty, orders, fault, at)
    assert held.wait() == expected[PROMPTS[2]]
    for answer in (failed, ahead):
        error = fails(answer)
        assert error.reason is Reason.SOURCE_FAILED
        assert ENDING_FAULTS[fault] in str(error)
    survivor.still_runs()
    survivor.check()
    again = faulty.ready()
    assert again.pid != before.pid
    assert again.restarts == before.restarts + 1
    assert faulty.ask("hello", 24).wait() == expected["hello"]
    faulty.settle()


@pytest.mark.campaign
@pytest.mark.parametrize("slots", [8, 1], ids=["on its way", "prefetched"])
def test_a_source_can_be_killed_after_every_span(
    tmp_path: Path, tiny: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """Two layers in three pieces are six spans; killed at the seventh frame, it has only not said that it is done.

    With one place, the survivor's, the prompt is computed ahead of its turn.
    """
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(keeper_module, "BACKOFF_S", (0.0,))
    orders, prompt = tmp_path / "orders.json", "c" * 70
    source = {"factory": "support.saboteur:create", "extra": {"orders": str(orders)}}
    stream = {"mode": Mode.STREAM, "layers_per_span": 1, "chunk": 32}
    with remote_owner(tmp_path / "state", tiny, source, {"slots": slots}, **stream) as remote:
        wanted = remote.ask(prompt, 24).wait()
        remote.harness.core.resident.runtime._inner._current_cache().forget_prefixes()
        for span in range(7):
            remote.turn()
            imported = remote.view.counters.remote
            survivor = Survivor(remote, expected)
            before = remote.until(lambda view, imported=imported: view.counters.remote > imported)
            order(orders, "die", span)
            failed = remote.ask(prompt, 24)
            error = fails(failed)
            assert (error.reason, "closed its end" in str(error)) == (Reason.SOURCE_FAILED, True)
            survivor.still_runs()
            survivor.check()
            after = remote.ready()
            assert after.counters.spans - before.counters.spans == span, "it was killed at another span"
            assert remote.ask(prompt, 24).wait() == wanted
            remote.settle()
            remote.harness.core.resident.runtime._inner._current_cache().forget_prefixes()
        assert remote.view.restarts == 7


def test_a_copy_that_fails_fails_its_request_alone(
    tmp_path: Path, tiny: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second copy of a prompt fails, at the device's boundary."""
    write, copies = DecoderImport.write, []

    def failing(self: DecoderImport, layer: int, first: int, states: Any) -> None:
        if armed:
            copies.append(layer)
            if len(copies) == 2:
                armed.clear()
                raise DeviceError(DeviceFault.LOST, "the copy engine is gone")
        write(self, layer, first, states)

    armed: list[bool] = []
    monkeypatch.setattr(DecoderImport, "write", failing)
    with remote_owner(tmp_path / "state", tiny, mode=Mode.STREAM, layers_per_span=1) as remote:
        survivor = Survivor(remote, expected)
        armed.append(True)
        error = fails(remote.ask("hello", 24))
        assert (error.reason, "the copy engine is gone" in str(error)) == (Reason.DEVICE_FAILED, True)
        survivor.still_runs()
        assert remote.ask("hello", 24).wait() == expected["hello"]
        survivor.check()
        remote.settle()
        assert (remote.view.state, remote.view.counters.failed) == ("READY", 1)


@pytest.mark.usefixtures("slow_steps")
def test_a_prompt_that_is_here_in_full_needs_no_source_any_more(
    tmp_path: Path, tiny: Path, expected: dict[str, list[int]]
) -> None:
    """It waits for the one place that there is."""
    with remote_owner(tmp_path / "state", tiny, owner={"slots": 1}, mode=Mode.STREAM) as remote:
        survivor = Survivor(remote, expected)
        ahead = remote.ask("hello", 24)
        remote.until(lambda view: [item.complete for item in list(remote.prefiller._live.values())] == [True])
        os.kill(remote.view.pid, signal.SIGKILL)
        remote.until(lambda view: view.restarts == 1)
        survivor.still_runs()
        survivor.check()
        assert ahead.wait() == expected["hello"]
        remote.settle()
        remote.check_counters(2)
