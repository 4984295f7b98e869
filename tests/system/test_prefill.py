"""Prompts computed by a real source process, imported by a real owner: same tokens, and nobody else is disturbed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.owners import WAIT_S, OwnerHarness, running_owner

from rowlock.daemon.owner.prefilling import SourceView
from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.daemon.prefill.settings import PrefillSettings, SourceSettings

TESTS = Path(__file__).resolve().parents[1]
PROMPTS = ("hello", "a" * 31, "b" * 32, "c" * 33, "The quick brown fox. " * 9)
SURVIVOR = "I will be here until the end. "
SURVIVOR_TOKENS = 512
BUSY = {"stream_layers": 1}


class Remote:
    """An owner whose prompts a source computes."""

    def __init__(self, harness: OwnerHarness) -> None:
        self.harness = harness
        self.ask = harness.ask
        self.prefiller = harness.core.prefiller

    @property
    def view(self) -> SourceView:
        source = self.harness.owner.view.source
        assert source is not None
        return source

    def until(self, met: Callable[[SourceView], bool]) -> SourceView:
        """Wait for the source: each of its changes makes the owner swap its view."""
        while not met(view := self.view):
            self.turn()
        return view

    def turn(self) -> None:
        """One turn of the owner thread."""
        owner: Any = self.harness.owner
        owner._ask(lambda promise: owner._promises.keep(promise, None)).result(WAIT_S)

    def ready(self) -> SourceView:
        self.turn()
        self.prefiller._keeper.settled.result(WAIT_S)
        return self.until(lambda view: view.state == "READY")

    def settle(self) -> None:
        """Nothing is on its way, and every page is where it belongs."""
        self.until(lambda view: view.live == 0)
        cache = self.harness.core.resident.runtime._inner._current_cache()
        cache.check_integrity()
        assert all(group.use.in_use == 0 for group in cache.groups)


@contextlib.contextmanager
def remote_owner(
    state: Path,
    checkpoint: Path,
    source: dict[str, Any] | None = None,
    owner: dict[str, Any] | None = None,
    **prefill: Any,
) -> Iterator[Remote]:
    settings = PrefillSettings(source=SourceSettings(widths=(64, 512, 2048), **(source or {})), **prefill)
    with running_owner(state, checkpoint, prefill=settings, **(owner or {})) as harness:
        remote = Remote(harness)
        remote.ready()
        yield remote


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
    [{}, {"mode": Mode.STREAM}, {"mode": Mode.STREAM, "layers_per_span": 2, "chunk": 37, "prefetch": False}],
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
