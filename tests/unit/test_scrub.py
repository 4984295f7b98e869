"""The scrub takes no more than its share of time, and none while anything else goes on."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from itertools import islice

import pytest
from support.owners import OwnerHarness

from rowlock.bindings.checkpoint.hashing import CHUNK_BYTES
from rowlock.daemon.owner.scrub import IDLE_LOOK_S, REST_MIN_S, Scrub, slices

READ_S = 0.004


class Rest(Future[None]):
    """A stretch of time that passes when somebody waits for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


class SlowClock:
    """Time that moves only when something takes it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.rests: list[float] = []

    def monotonic(self) -> float:
        return self.seconds

    now = monotonic

    def after(self, seconds: float) -> Future[None]:
        self.rests.append(seconds)
        return Rest(seconds)


@pytest.fixture
def clock(owner: OwnerHarness, monkeypatch: pytest.MonkeyPatch) -> SlowClock:
    """The owner's, stopped, with a memory whose every read takes a while."""
    owner.owner.stop()
    clock, memory = SlowClock(), owner.core.binding.memory
    real = memory.read_rows

    def slow(*arguments: object) -> None:
        clock.seconds += READ_S
        real(*arguments)

    monkeypatch.setattr(memory, "read_rows", slow)
    monkeypatch.setattr(owner.core, "context", _with(owner.core.context, clock))
    return clock


def _with(context, clock):  # type: ignore[no-untyped-def]
    return type(context)(**{**vars(context), "clock": clock})


def drive(scrub: Scrub, clock: SlowClock, steps: int) -> Iterator[None]:
    """Do what the owner thread does: go on when what the scrub waits for is done."""
    for future in islice(scrub.run(), steps):
        if isinstance(future, Rest):
            clock.seconds += future.seconds
            future.set_result(None)
            yield
        elif future is not None:
            future.result()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_reading_takes_no_more_than_its_share(owner: OwnerHarness, clock: SlowClock, share: float) -> None:
    for _ in drive(Scrub(owner.core, owner.owner._keeper, share, lambda: True), clock, 200):
        assert len(clock.rests) * READ_S <= clock.seconds * share + 1e-9
    assert owner.core.scrubbed > 0, "passes were ended"
    assert min(clock.rests) >= REST_MIN_S


def test_nothing_is_read_while_something_else_goes_on(owner: OwnerHarness, clock: SlowClock) -> None:
    before = owner.core.binding.counters.bytes_read_back
    for _ in drive(Scrub(owner.core, owner.owner._keeper, 0.5, lambda: False), clock, 50):
        pass
    assert owner.core.binding.counters.bytes_read_back == before
    assert set(clock.rests) == {IDLE_LOOK_S}


def test_slices_are_bounded_and_cover_every_byte(owner: OwnerHarness) -> None:
    resident = owner.owner.view.resident
    assert resident is not None
    found = list(slices(resident))
    assert sum(item.stop - item.start for item in found) == resident.model.layout.nbytes
    assert max(item.stop - item.start for item in found) <= CHUNK_BYTES
