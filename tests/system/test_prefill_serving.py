"""How imports share the owner with decoding: ahead of their turn, within the pool, and through every door."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.commands import rowlock
from support.daemons import answer, owner
from support.http import HTTP, url_of
from support.owners import OwnerHarness, running_owner
from support.prefilling import Gate, fails, remote_owner, until_nothing_is_open

from rowlock.bindings.device import Sequence, Step
from rowlock.bindings.model.cache.geometry import CacheLimits
from rowlock.bindings.model.importing import DecoderImport
from rowlock.bindings.model.runtime import DecoderRuntime
from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.daemon.owner.requests import GivenUp
from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.v1 import inference_pb2, owner_pb2
from rowlock.v1.errors import OwnerError, Reason

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
PAGE_BYTES = 2 * 32 * 128
"""Of the tiny model: two layers, 32 tokens."""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[OwnerHarness]:
    """Who computes its prompts itself: the reference."""
    with running_owner(tmp_path_factory.mktemp("local") / "state", tiny) as harness:
        yield harness


def pool_of(pages: int) -> dict[str, object]:
    """Settings of an owner with so many pages."""
    return {"cache": CacheLimits(cache_bytes=pages * PAGE_BYTES, page_tokens=32)}


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the device is asked for: a step of decoding, or a copy of K/V."""
    asked: list[str] = []
    advance, write = DecoderRuntime.advance, DecoderImport.write

    def advanced(self: DecoderRuntime, sequences: list[Sequence]) -> list[Step]:
        steps = advance(self, sequences)
        asked.append("step")
        return steps

    def written(self: DecoderImport, *states: Any) -> None:
        write(self, *states)
        asked.append("import")

    monkeypatch.setattr(DecoderRuntime, "advance", advanced)
    monkeypatch.setattr(DecoderImport, "write", written)
    return asked


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_next_prompt_is_imported_between_steps_of_the_one_that_runs(
    tmp_path: Path, tiny: Path, local: OwnerHarness, trace: list[str], prefetch: bool
) -> None:
    """One place: the second request cannot run before the first has ended, but its prompt can be here."""
    expected = [local.tokens("hello", 1500), local.tokens("a" * 40, 4)]
    trace.clear()
    stream = {"mode": Mode.STREAM, "layers_per_span": 1}
    with remote_owner(tmp_path / "state", tiny, owner={"slots": 1}, prefetch=prefetch, **stream) as remote:
        first = remote.ask("hello", 1500)
        if prefetch:
            first.wait_token()
        second = remote.ask("a" * 40, 4)
        assert [first.wait(), second.wait()] == expected
        remote.settle()
        remote.check_counters(2)
    own, others = [index for index, what in enumerate(trace) if what == "import"][:2], trace.count("import") - 2
    assert own == [0, 1], "the prompt of the first, layer by layer"
    steps = [index for index, what in enumerate(trace) if what == "step"]
    last_of_first = steps[1498]  # its first token came with its prompt
    between = trace[steps[0] : last_of_first].count("import")
    assert others == 2
    assert between == (2 if prefetch else 0), "a prompt is imported between two steps of another request, or after all"


@pytest.mark.parametrize("survivor", [False, True])
def test_a_pool_of_exactly_what_waits_is_enough(
    tmp_path: Path, tiny: Path, local: OwnerHarness, survivor: bool
) -> None:
    texts = ("a" * 40, "b" * 40, "c" * 40, "d" * 40)
    alone, long = [local.tokens(text, 20) for text in texts], local.tokens("s" * 30, 512)
    pages = 4 + 17 * survivor
    with remote_owner(tmp_path / "state", tiny, owner=pool_of(pages), mode=Mode.STREAM) as remote:
        assert remote.harness.core.resident.runtime.cache.groups[0].pages == pages
        running = remote.ask("s" * 30, 512) if survivor else None
        together = [remote.ask(text, 20) for text in texts]
        assert [answer.wait() for answer in together] == alone
        too_long = fails(remote.ask("e" * 32 * pages, 20))
        assert too_long.reason is Reason.CACHE_EXCEEDED
        assert f"the cache has {pages}" in str(too_long)
        assert remote.ask(texts[0], 20).wait() == alone[0]
        assert running is None or running.wait() == long
        remote.settle()
        remote.check_counters(5 + survivor)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_prompt_that_is_ahead_gives_its_pages_to_requests_that_run(
    tmp_path: Path, tiny: Path, local: OwnerHarness, slots: int
) -> None:
    """Those that run find no page, and nothing else runs; who is ahead has no place while they have them."""
    running = [letter * 20 for letter in "ab"[:slots]]
    expected = [local.tokens(text, 100) for text in running], local.tokens("c" * 40, 4)
    with remote_owner(tmp_path / "state", tiny, owner={"slots": slots, **pool_of(4)}, mode=Mode.STREAM) as remote:
        first = [remote.ask(text, 100) for text in running]
        for answer in first:
            answer.wait_token()
        ahead = remote.ask("c" * 40, 4)
        assert ([answer.wait() for answer in first], ahead.wait()) == expected
        remote.settle()
        remote.check_counters(slots + 1)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(2, 12))])
def test_whatever_comes_when_every_request_ends_with_its_own_tokens(
    tmp_path: Path, tiny: Path, local: OwnerHarness, seed: int
) -> None:
    """Few places, few pages, many requests, some of which are given up."""
    dice = random.Random(seed)
    slots, pages = dice.randint(1, 3), dice.randint(4, 8)
    settings: dict[str, Any] = {"mode": Mode.STREAM, "layers_per_span": 1, "chunk": dice.choice((0, 20))}
    with remote_owner(tmp_path / "state", tiny, owner={"slots": slots, **pool_of(pages)}, **settings) as remote:
        asked = []
        for _ in range(40):
            prompt, given_up = chr(dice.randint(97, 122)) * dice.randint(1, 60), GivenUp()
            count = dice.choice((1, dice.randint(2, 128 - len(prompt))))
            asked.append((prompt, count, given_up, remote.ask(prompt, count, cancelled=given_up)))
            if dice.random() < 0.2:
                dice.choice(asked)[2].set()
            time.sleep(dice.choice((0, 0, 0.003)))
        for prompt, count, given_up, answer in asked:
            if given_up.is_set():
                with contextlib.suppress(OwnerError):
                    answer.wait()
            else:
                assert answer.wait() == local.tokens(prompt, count)
        remote.settle()
        assert (remote.view.counters.failed, remote.view.counters.fallbacks) == (0, 0)


@pytest.mark.campaign
def test_the_source_says_when_it_has_too_little_memory_and_the_next_prompt_works(tmp_path: Path, tiny: Path) -> None:
    with remote_owner(tmp_path / "state", tiny, {"memory_max": 12_000}) as remote:
        error = fails(remote.ask("x" * 60, 4))
        assert error.reason is Reason.MEMORY_SHORT
        assert "bytes; 12000 are allowed here" in str(error)
        assert remote.ask("x" * 30, 4).wait()


@pytest.mark.torch_bits
def test_the_example_is_a_source(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = ROOT / "examples" / "transformers_source.py"
    assert len(example.read_text().splitlines()) < 100
    monkeypatch.setenv("PYTHONPATH", str(example.parent))
    prompts = ["hello", "a" * 33, "The quick brown fox. " * 9]
    with running_owner(tmp_path / "ours", tiny) as local:
        expected = [local.tokens(text, 24) for text in prompts]
    with remote_owner(tmp_path / "theirs", tiny, {"factory": "transformers_source:create"}) as remote:
        assert remote.view.name == "transformers on cpu"
        assert [remote.ask(text, 24).wait() for text in prompts] == expected
        assert remote.view.counters.remote == 3


@pytest.fixture
def answers(tiny: Path, tmp_path: Path) -> Callable[[str, list[str]], dict[str, object]]:
    """What a daemon with these options says, over gRPC and as a stream of server-sent events."""

    def ask(name: str, options: list[str]) -> dict[str, object]:
        found: dict[str, object] = {}
        with DaemonProcess(tmp_path / name, [*HTTP, "--checkpoint", str(tiny), *options]) as daemon:
            for text in ("hello", "a" * 33, "The quick brown fox. " * 9):
                found[f"gRPC {text}"] = answer(daemon, text)[0]
                body = {"model": "rowlock", "prompt": text, "max_tokens": 24, "temperature": 0, "stream": True}
                with httpx.stream("POST", f"{url_of(daemon)}/v1/completions", json=body, timeout=60) as stream:
                    lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
                found[f"SSE {text}"] = "".join(json.loads(line)["choices"][0]["text"] for line in lines)
            source = owner(daemon).source
            assert source.prompts_imported == (6 if options else 0)
            assert (source.prompts_failed, source.local_fallbacks) == (0, 0)
            if options:
                assert source.mode == name
                assert source.spans_imported == (12 if name == "stream" else 6), "two layers, each or both"
                for command in ("status", "describe"):
                    shown = rowlock(command, endpoint=daemon.client.endpoint).out
                    assert "source     READY, pid" in shown
                    assert f"6 imported ({source.spans_imported} spans, " in shown
                metrics = httpx.get(f"{url_of(daemon)}/metrics").text
                assert 'rowlock_source_state{state="READY"} 1.0' in metrics
                assert 'rowlock_prefill_prompts_total{outcome="imported"} 6.0' in metrics
        return found

    return ask


def test_every_door_gives_the_same_whoever_computes_the_prompts(
    answers: Callable[[str, list[str]], dict[str, object]],
) -> None:
    native = answers("native", [])
    assert answers("whole", ["--prefill", "subprocess"]) == native
    assert answers("stream", ["--prefill", "subprocess", "--prefill-stream-layers", "1"]) == native


def source_file(tmp_path: Path, **keys: object) -> list[str]:
    """Options of a daemon with such a source."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items() if not isinstance(value, dict)]
    lines += [
        f"{key} = {{{', '.join(f'{a} = {json.dumps(b)}' for a, b in value.items())}}}"
        for key, value in keys.items()
        if isinstance(value, dict)
    ]
    (tmp_path / "rowlock.toml").write_text("\n".join(["[prefill]", 'source = "subprocess"', *lines]))
    return ["--config", str(tmp_path / "rowlock.toml")]


@pytest.mark.parametrize("fallback", [False, True])
def test_a_source_that_is_away_is_shown_everywhere(tmp_path: Path, tiny: Path, fallback: bool) -> None:
    options = [*HTTP, "--checkpoint", str(tiny), *source_file(tmp_path, python="/no/such/python", fallback=fallback)]
    with DaemonProcess(tmp_path / "state", options) as daemon:
        while (source := owner(daemon).source).state != "ABSENT":
            time.sleep(0.05)
        assert "No such file or directory: '/no/such/python'" in source.reason
        if fallback:
            assert len(answer(daemon)[0]) == 8
        else:
            with pytest.raises(ClientError, match="No such file"):
                answer(daemon)
        shown = rowlock("status", endpoint=daemon.client.endpoint).out
        assert "source     ABSENT, whole" in shown
        assert "/no/such/python" in shown
        assert f"{int(fallback)} computed here instead" in shown
        metrics = httpx.get(f"{url_of(daemon)}/metrics").text
        assert 'rowlock_source_state{state="ABSENT"} 1.0' in metrics
        assert 'rowlock_source_state{state="READY"} 0.0' in metrics
        assert f'rowlock_prefill_prompts_total{{outcome="computed_here"}} {float(fallback)}' in metrics


def pages_in_use(daemon: DaemonProcess) -> list[int]:
    described = daemon.client.call(daemon.client.owner.Describe, owner_pb2.DescribeRequest())
    return [group.in_use for group in described.cache.groups]


@pytest.mark.parametrize("door", ["gRPC", "HTTP"])
def test_a_client_that_hangs_up_before_its_first_token_leaves_nothing(
    tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    """The source is held up after the first of two layers; nothing of it is left in either process."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    orders = tmp_path / "orders.json"
    options = {"factory": "support.saboteur:create", "options": {"orders": str(orders)}, "stream_layers": 1}
    arguments = [*HTTP, "--checkpoint", str(tiny), *source_file(tmp_path, **options)]
    with DaemonProcess(tmp_path / "state", arguments) as daemon:
        expected = answer(daemon)
        gate = Gate(orders)
        gate.close_at(1)
        body = {"model": "rowlock", "prompt": "a" * 40, "max_tokens": 24, "stream": True}
        if door == "HTTP":
            with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=5) as client:
                client.post(f"{url_of(daemon)}/v1/completions", json=body)
        else:
            request = inference_pb2.GenerateRequest(prompt="a" * 40, max_tokens=24)
            call = daemon.client.inference.Generate(request)
            gate.wait()
            call.cancel()
        while owner(daemon).requests_active or owner(daemon).source.prompts_live:
            time.sleep(0.02)
        gate.open()
        assert answer(daemon) == expected
        deadline = time.monotonic() + 10  # the last token is told before its pages are seen to be free
        while (in_use := pages_in_use(daemon)) != [0]:
            assert time.monotonic() < deadline, in_use
            time.sleep(0.02)
        source = owner(daemon).source
        assert (source.prompts_imported, source.prompts_failed, source.local_fallbacks) == (2, 0, 0)
        for process in (daemon.process.pid, source.pid):
            until_nothing_is_open(str(process))
