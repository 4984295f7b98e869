"""Requests whose clients give up while their prompts are on their way: whatever they held serves others."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.prefilling import PROMPTS, Gate, Survivor, fails, local_answers, remote_owner

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.cache.geometry import CacheLimits
from rowlock.bindings.model.cache.pages import PagePool
from rowlock.daemon.owner.requests import GivenUp
from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.v1.errors import Reason

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> dict[str, list[int]]:
    return local_answers(tmp_path_factory.mktemp("local") / "state", tiny)


def test_pages_of_a_request_that_ended_are_lost_when_its_copies_cannot_be_fenced(
    tmp_path: Path, tiny: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    orders = tmp_path / "orders.json"
    source = {"factory": "support.saboteur:create", "extra": {"orders": str(orders)}}
    with remote_owner(tmp_path / "state", tiny, source, mode=Mode.STREAM, layers_per_span=1) as remote:
        survivor, gate, gave_up = Survivor(remote, expected), Gate(orders), GivenUp()
        gate.close_at(1)
        answer = remote.ask("c" * 33, 24, cancelled=gave_up)
        remote.until_spans(1)
        (item,) = remote.prefiller._live.values()

        def lost() -> None:
            raise DeviceError(DeviceFault.TIMEOUT, "no answer")

        item._importer.fence = lost
        gave_up.set()
        assert fails(answer).reason is Reason.CANCELLED
        survivor.still_runs()
        gate.open()
        survivor.check()
        assert remote.ask("hello", 24).wait() == expected["hello"]
        remote.settle()
        assert remote.view.counters.quarantined == 1
        assert remote.cache.groups[0].use.quarantined == 2, "its pages are never used again"


@pytest.mark.parametrize("deaf", ["", pytest.param("1", marks=pytest.mark.campaign)])
def test_a_request_can_end_at_every_span_and_its_pages_serve_another_at_once(
    tmp_path: Path, tiny: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, deaf: str
) -> None:
    """The pool has room for one of them. A deaf source goes on with what nobody wants any more."""
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


def test_pages_of_a_request_that_ended_serve_the_next_while_another_runs(
    tmp_path: Path, tiny: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every span; the pool has room for the one that runs, and for one of the others."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    taken: list[set[int]] = []
    take = PagePool.take

    def watched(self: PagePool, count: int) -> list[int]:
        pages = take(self, count)
        taken.append(set(pages))
        return pages

    monkeypatch.setattr(PagePool, "take", watched)
    orders = tmp_path / "orders.json"
    source = {"factory": "support.saboteur:create", "extra": {"orders": str(orders)}, "silence_s": 30.0}
    owner = {"cache": CacheLimits(cache_bytes=(17 + 2) * 2 * 32 * 128, page_tokens=32)}
    gate = Gate(orders)
    with remote_owner(tmp_path / "state", tiny, source, owner, mode=Mode.STREAM, layers_per_span=1) as remote:
        for span in range(3):
            survivor, gave_up = Survivor(remote, expected), GivenUp()
            gate.close_at(span)
            answer = remote.ask("c" * 33, 24, cancelled=gave_up)
            remote.until_spans(span)
            (mine,) = [set(item._room._inner._room._table.held[0]) for item in remote.prefiller._live.values()]
            before = len(taken)
            gave_up.set()
            assert fails(answer).reason is Reason.CANCELLED
            survivor.still_runs()
            other = remote.ask(PROMPTS[2], 24)
            gate.open()
            assert other.wait() == expected[PROMPTS[2]]
            survivor.check()
            remote.settle()
            assert any(pages & mine for pages in taken[before:]), "its pages were used again"
            remote.cache.forget_prefixes()
        remote.check_counters(6)
