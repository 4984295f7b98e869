"""Prompts computed by a real source process, imported by a real owner: same tokens, and nobody else is disturbed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_tiny
from support.owners import running_owner
from support.prefilling import PROMPTS, local_answers, remote_owner

from rowlock.bindings.cpu.binding import CpuBinding
from rowlock.daemon import service as service_module
from rowlock.daemon.environments import DeviceRefusedError
from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.daemon.settings import Settings


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> dict[str, list[int]]:
    return local_answers(tmp_path_factory.mktemp("local") / "state", tiny)


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
    tmp_path: Path, tiny: Path, expected: dict[str, list[int]], prefill: dict[str, Any]
) -> None:
    with remote_owner(tmp_path / "state", tiny, **prefill) as remote:
        answers = [remote.ask(prompt, 24) for prompt in PROMPTS]
        assert [answer.wait() for answer in answers] == [expected[prompt] for prompt in PROMPTS]
        again = remote.ask(PROMPTS[-1], 24)  # its beginning is in pages already
        assert again.wait() == expected[PROMPTS[-1]]
        assert remote.ask("hello", 1).wait() == expected["hello"][:1]
        remote.settle()
        remote.check_counters(len(PROMPTS) + 2)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("prefetch", [True, pytest.param(False, marks=pytest.mark.campaign)])
def test_every_family_gets_its_own_tokens_however_many_ask_at_once(tmp_path: Path, family: str, prefetch: bool) -> None:
    """With one place, so that prompts are there ahead of their turn, or not; and requests that end at once."""
    plain = write_tiny(tmp_path / "plain", family=family)
    with running_owner(tmp_path / "plain-state", plain) as owner:
        expected = {prompt: owner.tokens(prompt, 32) for prompt in PROMPTS}
    # the same weights, but the first token of an answer ends it
    ending = write_tiny(tmp_path / "ending", family=family, eos_token_id=expected["hello"][0])
    stream = {"mode": Mode.STREAM, "layers_per_span": 1, "chunk": 20}
    with remote_owner(tmp_path / "state", ending, owner={"slots": 1}, prefetch=prefetch, **stream) as remote:
        for count in (1, 2, 4):
            remote.cache.forget_prefixes()
            answers = [remote.ask(prompt, 32) for prompt in PROMPTS[:count]]
            assert [answer.wait() for answer in answers] == [expected[prompt] for prompt in PROMPTS[:count]]
        assert remote.ask("hello", 1).wait() == expected["hello"][:1]
        ended = remote.ask("hello", 32, ignore_eos=False)
        assert (ended.wait(), ended.stopped) == ([], True)
        remote.settle()
        remote.check_counters(1 + 2 + 4 + 2)


def test_short_prompts_are_transferred_whole_all_the_same(
    tmp_path: Path, tiny: Path, expected: dict[str, list[int]]
) -> None:
    stream = {"mode": Mode.STREAM, "layers_per_span": 1, "stream_from": 32}
    with remote_owner(tmp_path / "state", tiny, **stream) as remote:
        for prompt, spans in (("a" * 31, 1), ("b" * 32, 1 + 2)):
            assert remote.ask(prompt, 24).wait() == expected[prompt]
            remote.settle()
            assert remote.view.counters.spans == spans
        remote.check_counters(2)


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
