"""Prompts computed by a real source process, imported by a real owner: same tokens, and nobody else is disturbed."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.owners import OwnerHarness, running_owner
from support.prefilling import Remote, fails, remote_owner

from rowlock.bindings.cpu.binding import CpuBinding
from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.cache.geometry import CacheLimits
from rowlock.bindings.model.importing import DecoderImport
from rowlock.daemon import service as service_module
from rowlock.daemon.environments import DeviceRefusedError
from rowlock.daemon.owner.requests import GivenUp
from rowlock.daemon.prefill import keeper as keeper_module
from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.daemon.settings import Settings
from rowlock.v1.errors import Reason

TESTS = Path(__file__).resolve().parents[1]
PROMPTS = ("hello", "a" * 31, "b" * 32, "c" * 33, "The quick brown fox. " * 9)
SURVIVOR = "I will be here until the end. "
SURVIVOR_TOKENS = 512
BUSY = {"stream_layers": 1}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[OwnerHarness]:
    """Who computes its prompts itself: the reference."""
    with running_owner(tmp_path_factory.mktemp("local") / "state", tiny) as harness:
        yield harness


@pytest.fixture(scope="module")
def expected(local: OwnerHarness) -> dict[str, list[int]]:
    texts = {prompt: local.tokens(prompt, 24) for prompt in PROMPTS}
    return {**texts, SURVIVOR: local.tokens(SURVIVOR, SURVIVOR_TOKENS)}


@pytest.mark.parametrize(
    "prefill",
    [
        pytest.param({}, marks=pytest.mark.campaign),
        {"mode": Mode.STREAM},
        pytest.param(
            {"mode": Mode.STREAM, "layers_per_span": 2, "chunk": 37, "prefetch": False}, marks=pytest.mark.campaign
        ),
    ],
)
def test_answers_are_those_of_an_owner_that_computes_its_prompts_itself(
    tmp_path: Path, tiny: Path, local: OwnerHarness, expected: dict[str, list[int]], prefill: dict[str, Any]
) -> None:
    with remote_owner(tmp_path / "state", tiny, **prefill) as remote:
        answers = [remote.ask(prompt, 24) for prompt in PROMPTS]
        assert [answer.wait() for answer in answers] == [expected[prompt] for prompt in PROMPTS]
        again = remote.ask(PROMPTS[-1], 24)  # its beginning is in pages already
        assert again.wait() == expected[PROMPTS[-1]]
        assert remote.ask("hello", 1).wait() == expected["hello"][:1]
        stop = local.ask("hello", 24, ignore_eos=False)
        assert remote.ask("hello", 24, ignore_eos=False).wait() == stop.wait()
        remote.settle()
        counters = remote.view.counters
        assert (counters.remote, counters.failed, counters.fallbacks) == (len(PROMPTS) + 3, 0, 0)


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


class Survivor:
    """A request that decodes while others fail; nothing of it may change."""

    def __init__(self, remote: Remote, expected: dict[str, list[int]]) -> None:
        remote.ready()
        self._answer = remote.ask(SURVIVOR, SURVIVOR_TOKENS)
        self._answer.wait_token()
        self._expected = expected[SURVIVOR]

    def check(self) -> None:
        assert self._answer.wait() == self._expected


def order(orders: Path, fault: str, at: int | None = 0) -> None:
    waiting = orders.with_suffix(".new")
    waiting.write_text(json.dumps({"fault": fault, "at": at}))
    waiting.rename(orders)


OWN_FAULTS = {
    "drop": "done.spans is 2, wanted 1",
    "duplicate": "overlap",
    "overlap": "overlap",
    "layer out of bounds": "span.layer_stop is 1001",
    "token out of bounds": "positions 0 to 6",
    "wrong dtype": "span.dtype is 3",
    "wrong shape": "span.kv_heads is 3",
    "wrong generation": "span.generation is 2",
    "early done": "done.generation",
    "error": "the device is tired",
}
"""Faults that fail one prompt; the source goes on."""


@pytest.mark.parametrize("fault", [name for name in OWN_FAULTS if name != "early done"])
def test_a_span_that_cannot_be_right_fails_its_request_alone(
    faulty: Remote, orders: Path, expected: dict[str, list[int]], fault: str
) -> None:
    survivor = Survivor(faulty, expected)
    before = faulty.view
    order(orders, fault)
    failed, other = faulty.ask("hello", 24), faulty.ask(PROMPTS[1], 24)
    error = fails(failed)
    assert error.reason is Reason.SOURCE_FAILED
    assert OWN_FAULTS[fault] in str(error)
    assert other.wait() == expected[PROMPTS[1]]
    assert faulty.ask("hello", 24).wait() == expected["hello"]
    survivor.check()
    faulty.settle()
    after = faulty.view
    assert (after.pid, after.counters.failed) == (before.pid, before.counters.failed + 1)


def test_done_before_everything_is_there_fails_its_request_alone(
    faulty: Remote, orders: Path, expected: dict[str, list[int]]
) -> None:
    survivor = Survivor(faulty, expected)
    order(orders, "early done", 1)
    error = fails(faulty.ask("hello", 24))
    assert "the source sent what was not asked for: done." in str(error)
    assert faulty.ask("hello", 24).wait() == expected["hello"]
    survivor.check()
    faulty.settle()


def test_a_second_done_changes_nothing(faulty: Remote, orders: Path, expected: dict[str, list[int]]) -> None:
    survivor = Survivor(faulty, expected)
    late = faulty.view.counters.late
    order(orders, "two dones", None)
    assert faulty.ask("hello", 24).wait() == expected["hello"]
    survivor.check()
    faulty.until(lambda view: view.counters.late == late + 1)
    faulty.settle()


ENDING_FAULTS = [
    pytest.param("die", 0, "closed its end", marks=pytest.mark.campaign),
    ("die", 1, "closed its end"),
    pytest.param("stop", 0, "said nothing of the prompt that it has", marks=pytest.mark.campaign),
    ("stop", 1, "said nothing of the prompt that it has"),
    pytest.param("truncated", 0, "sent something that is no frame", marks=pytest.mark.campaign),
    pytest.param("wrong request", 0, "which it was never asked for", marks=pytest.mark.campaign),
]


@pytest.mark.parametrize(("fault", "at", "word"), ENDING_FAULTS)
def test_a_source_that_ends_loses_its_prompts_and_is_started_again(
    faulty: Remote, orders: Path, expected: dict[str, list[int]], fault: str, at: int, word: str
) -> None:
    survivor = Survivor(faulty, expected)
    before = faulty.view
    order(orders, fault, at)
    failed, ahead = faulty.ask("hello", 24), faulty.ask(PROMPTS[1], 24)
    for answer in (failed, ahead):
        error = fails(answer)
        assert error.reason is Reason.SOURCE_FAILED
        assert word in str(error)
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
            survivor.check()
            after = remote.ready()
            assert after.counters.spans - before.counters.spans == span, "it was killed at another span"
            assert remote.ask(prompt, 24).wait() == wanted
            remote.settle()
            remote.harness.core.resident.runtime._inner._current_cache().forget_prefixes()
        assert remote.view.restarts == 7
    gc.collect()
    assert not open_files()


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
        assert remote.ask("hello", 24).wait() == expected["hello"]
        survivor.check()
        remote.settle()
        assert (remote.view.state, remote.view.counters.failed) == ("READY", 1)


def test_a_device_that_cannot_import_is_refused_at_the_start(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_binding = service_module.open_binding

    def without_imports(settings: Settings) -> CpuBinding:
        binding = open_binding(settings)
        binding.facts = replace(binding.facts, imports=False)
        return binding

    monkeypatch.setattr(service_module, "open_binding", without_imports)
    with pytest.raises(DeviceRefusedError, match=r"cannot import K/V.*--prefill none"), remote_owner(tmp_path, tiny):
        pass


def open_files() -> list[str]:
    """What this process has open, and what of it is the memory of a request; mappings too."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(link.readlink()))
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "rowlock-prefill" in line]
    return [name for name in found if "rowlock-prefill" in name] + mapped


def until_nothing_is_open() -> None:
    deadline = time.monotonic() + 30
    while open_files():
        assert time.monotonic() < deadline, open_files()
        gc.collect()
        time.sleep(0.05)


class Gate:
    """Holds a source up at a span, until it is opened."""

    def __init__(self, orders: Path) -> None:
        self._orders = orders
        self._path = orders.with_suffix(".gate")
        self._path.unlink(missing_ok=True)
        os.mkfifo(self._path)

    def close_at(self, span: int) -> None:
        order(self._orders, "gate", span)

    def open(self) -> None:
        with open(self._path, "w"):
            """The source has it open for reading now, and goes on."""


@pytest.mark.parametrize("deaf", ["", pytest.param("1", marks=pytest.mark.campaign)])
def test_a_request_can_end_at_every_span_and_its_pages_serve_another_at_once(
    tmp_path: Path, tiny: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, deaf: str
) -> None:
    """The pool has room for one of them. A deaf source goes on with what nobody wants any more."""
    until_nothing_is_open()  # sources of earlier tests of this process may just be ending
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    orders = tmp_path / "orders.json"
    source = {"factory": "support.saboteur:create", "extra": {"orders": str(orders), "deaf": deaf}, "silence_s": 30.0}
    owner = {"cache": CacheLimits(cache_bytes=2 * 2 * 32 * 128, page_tokens=32)}
    gate = Gate(orders)
    with remote_owner(tmp_path / "state", tiny, source, owner, mode=Mode.STREAM, layers_per_span=1) as remote:
        assert remote.harness.core.resident.runtime.cache.groups[0].pages == 2
        for span in range(3):
            gave_up = GivenUp()
            gate.close_at(span)
            answer = remote.ask("c" * 33, 24, cancelled=gave_up)
            remote.until_spans(span)
            gave_up.set()
            assert fails(answer).reason is Reason.CANCELLED
            other = remote.ask(PROMPTS[2], 24)
            gate.open()
            assert other.wait() == expected[PROMPTS[2]]
            remote.settle()
        if deaf:
            assert remote.view.counters.late >= 6, "what it still sends is counted, and goes nowhere"
        assert remote.view.state == "READY"
    assert not open_files()
