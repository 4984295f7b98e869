"""How imports share the owner with decoding: ahead of their turn, within the pool, and through every door."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from support.commands import rowlock
from support.daemons import answer, owner
from support.http import HTTP, url_of
from support.owners import running_owner
from support.prefilling import fails, remote_owner

from rowlock.bindings.model.cache.geometry import CacheLimits
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.v1.errors import Reason

ROOT = Path(__file__).resolve().parents[2]
PAGE_BYTES = 2 * 32 * 128
"""Of the tiny model: two layers, 32 tokens."""


@pytest.mark.parametrize("prefetch", [True, False])
def test_the_next_prompt_is_imported_between_steps_of_the_one_that_runs(
    tmp_path: Path, tiny: Path, prefetch: bool
) -> None:
    """One place: the second request cannot run before the first has ended, but its prompt can be here."""
    with remote_owner(tmp_path / "state", tiny, owner={"slots": 1}, mode=Mode.STREAM, prefetch=prefetch) as remote:
        first = remote.ask("hello", 1500)
        if prefetch:
            first.wait_token()
        second = remote.ask("a" * 40, 4)
        first.wait_token()
        if not prefetch:
            remote.until(lambda view: view.live == 0)
            assert remote.view.counters.remote == 1, "the second was asked for ahead"
        first.wait()
        ended = remote.prefiller._now_ns()
        second.wait()
        remote.settle()
        one, two = list(remote.prefiller.timelines)
        assert one.admitted < two.admitted
        copied = [stop for _, stop, _ in two.copies]
        if prefetch:
            assert one.admitted < min(copied)
            assert max(copied) < ended, "the second prompt was here while the first request still ran"
        else:
            assert two.begun > one.admitted


def test_a_pool_of_exactly_what_waits_is_enough(tmp_path: Path, tiny: Path) -> None:
    owner = {"cache": CacheLimits(cache_bytes=4 * PAGE_BYTES, page_tokens=32)}
    with remote_owner(tmp_path / "state", tiny, owner=owner, mode=Mode.STREAM) as remote:
        assert remote.harness.core.resident.runtime.cache.groups[0].pages == 4
        alone = [remote.ask(text, 20).wait() for text in ("a" * 40, "b" * 40, "c" * 40, "d" * 40)]
        together = [remote.ask(text, 20) for text in ("a" * 40, "b" * 40, "c" * 40, "d" * 40)]
        assert [answer.wait() for answer in together] == alone
        too_long = fails(remote.ask("e" * 120, 20))
        assert too_long.reason is Reason.CACHE_EXCEEDED
        assert "4" in str(too_long)
        assert remote.ask("a" * 40, 20).wait() == alone[0]
        remote.settle()
        assert remote.view.counters.failed == 0


@pytest.mark.campaign
def test_the_source_says_when_it_has_too_little_memory_and_the_next_prompt_works(tmp_path: Path, tiny: Path) -> None:
    with remote_owner(tmp_path / "state", tiny, {"memory_max": 12_000}) as remote:
        error = fails(remote.ask("x" * 60, 4))
        assert error.reason is Reason.MEMORY_SHORT
        assert "bytes; 12000 are allowed here" in str(error)
        assert remote.ask("x" * 30, 4).wait()


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
                shown = rowlock("status", endpoint=daemon.client.endpoint).out
                assert "source     READY" in shown
                assert "6 imported" in shown
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
