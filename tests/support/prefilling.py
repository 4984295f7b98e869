"""An owner in this process whose prompts a real source process computes."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from rowlock.bindings.device import Sequence, Step
from rowlock.bindings.model.runtime import DecoderRuntime
from rowlock.daemon.owner.prefilling import SourceView
from rowlock.daemon.prefill.settings import PrefillSettings, SourceSettings
from rowlock.v1.errors import OwnerError
from support.owners import WAIT_S, Answer, OwnerHarness, running_owner

PROMPTS = ("hello", "a" * 31, "b" * 32, "c" * 33, "The quick brown fox. " * 9)
SURVIVOR = "I will be here until the end. "
SURVIVOR_TOKENS = 512
DEADLINE_S = 30
"""For what takes milliseconds, or a second or two where a source has to be silent first."""


class Remote:
    """An owner whose prompts a source computes."""

    def __init__(self, harness: OwnerHarness) -> None:
        self.harness = harness
        self.ask = harness.ask
        self.prefiller = harness.core.prefiller
        self._before = open_memory("self")

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

    def until_spans(self, count: int) -> None:
        """Until the one prompt on its way has so many spans here."""
        live = self.prefiller._live
        self.until(lambda view: view.live == 1 and [item.spans >= count for item in list(live.values())] == [True])

    def ready(self) -> SourceView:
        self.turn()
        self.prefiller._keeper.settled.result(WAIT_S)
        return self.until(lambda view: view.state == "READY")

    @property
    def cache(self) -> Any:
        return self.harness.core.resident.runtime._inner._current_cache()

    def settle(self) -> None:
        """Nothing is on its way, every page is where it belongs, and no memory of a request is open or mapped."""
        self.until(lambda view: view.live == 0)
        self.cache.check_integrity()
        assert all(group.use.in_use == 0 for group in self.cache.groups)
        until_nothing_is_open("self", self._before)
        if self.view.pid:
            until_nothing_is_open(str(self.view.pid))

    def check_counters(self, remote: int, failed: int = 0) -> None:
        """So many prompts were computed by the source, so many failed, and none was computed here."""
        counters = self.view.counters
        assert (counters.remote, counters.failed, counters.fallbacks) == (remote, failed, 0)


@contextlib.contextmanager
def remote_owner(
    state: Path,
    checkpoint: Path,
    source: dict[str, Any] | None = None,
    owner: dict[str, Any] | None = None,
    *,
    wait: bool = True,
    **prefill: Any,
) -> Iterator[Remote]:
    """Both, ready; or, without ``wait``, as they come up."""
    settings = PrefillSettings(source=SourceSettings(**{"widths": (64, 512, 2048), **(source or {})}), **prefill)
    with running_owner(state, checkpoint, prefill=settings, **(owner or {})) as harness:
        remote = Remote(harness)
        if wait:
            remote.ready()
        yield remote


def fails(answer: Answer) -> OwnerError:
    """What a request failed with, in good time: long before whoever minds the source is at the end of its patience."""
    asked = time.monotonic()
    with pytest.raises(OwnerError) as caught:
        answer.wait()
    assert time.monotonic() - asked < DEADLINE_S
    return caught.value


def open_memory(process: str) -> list[str]:
    """What of a process's descriptors and mappings is memory of a request."""
    found = []
    with contextlib.suppress(FileNotFoundError):  # a source may just be ending
        for link in Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(f"{link.name}: {link.readlink()}")
        found += Path(f"/proc/{process}/maps").read_text().splitlines()
    return [line for line in found if "rowlock-prefill" in line]


def until_nothing_is_open(process: str, but: Collection[str] = ()) -> None:
    """But for what was there before."""
    deadline = time.monotonic() + DEADLINE_S
    while found := [item for item in open_memory(process) if item not in but]:
        assert time.monotonic() < deadline, found
        gc.collect()
        time.sleep(0.02)


def order(orders: Path, fault: str, at: int | None = 0) -> None:
    """Have a saboteur do wrong, see there."""
    waiting = orders.with_suffix(".new")
    waiting.write_text(json.dumps({"fault": fault, "at": at}))
    waiting.rename(orders)


class Gate:
    """Holds a source up at a span, until it is opened."""

    def __init__(self, orders: Path) -> None:
        self._orders = orders
        self._path = orders.with_suffix(".gate")
        self._path.unlink(missing_ok=True)
        os.mkfifo(self._path)

    def close_at(self, span: int) -> None:
        order(self._orders, "gate", span)

    def wait(self) -> None:
        """Until the source is there."""
        while self._orders.exists():
            time.sleep(0.005)

    def open(self) -> None:
        with open(self._path, "w"):
            """The source has it open for reading now, and goes on."""


def local_answers(state: Path, checkpoint: Path) -> dict[str, list[int]]:
    """Of an owner that computes its prompts itself: 24 tokens each, and those of a survivor."""
    with running_owner(state, checkpoint) as local:
        texts = {prompt: local.tokens(prompt, 24) for prompt in PROMPTS}
        return {**texts, SURVIVOR: local.tokens(SURVIVOR, SURVIVOR_TOKENS)}


class Survivor:
    """A request that decodes while others fail; nothing of it may change."""

    def __init__(self, remote: Remote, expected: dict[str, list[int]]) -> None:
        remote.ready()
        self._answer = remote.ask(SURVIVOR, SURVIVOR_TOKENS)
        self._answer.wait_token()
        self._expected = expected[SURVIVOR]

    def still_runs(self) -> None:
        """It did so while something else failed."""
        assert self._answer.stopped is None, "it had ended before"

    def check(self) -> None:
        assert self._answer.wait() == self._expected


def slow_down(patch: pytest.MonkeyPatch, step_s: float = 0.007) -> None:
    """Have each step of the model take longer, so that a request outlasts what happens beside it."""
    advance = DecoderRuntime.advance

    def slowly(self: DecoderRuntime, sequences: list[Sequence]) -> list[Step]:
        time.sleep(step_s)
        return advance(self, sequences)

    patch.setattr(DecoderRuntime, "advance", slowly)
