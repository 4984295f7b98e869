"""Staging gives way to decoding."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field

import pytest

from rowlock.daemon import pacing
from rowlock.daemon.pacing import STEP_LOOK_S, STEP_WAIT_S, PacedExecutor


@dataclass
class Decoding:
    """So many requests that run; a step ends after so many looks of those who wait for it."""

    decoding: bool = True
    steps: int = 0
    looks_per_step: int = 3
    stepped: float = -math.inf
    rests: list[float] = field(default_factory=list)

    def rest(self, seconds: float) -> None:
        self.rests.append(seconds)
        if len(self.rests) % self.looks_per_step == 0:
            self.steps += 1


class Running:
    """Pieces that wait to be let go, and how many run at once."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.release = threading.Event()

    def piece(self) -> None:
        self.entered.release()
        assert self.release.wait(30)


def test_all_threads_while_nothing_decodes() -> None:
    running = Running()
    with PacedExecutor(3, Decoding(decoding=False)) as executor:
        pieces = [executor.submit(running.piece) for _ in range(3)]
        for _ in pieces:
            assert running.entered.acquire(timeout=30)
        running.release.set()


def test_one_thread_while_requests_run() -> None:
    running, decoding = Running(), Decoding()
    with PacedExecutor(3, decoding, decoding.rest) as executor:
        pieces = [executor.submit(running.piece) for _ in range(3)]
        assert running.entered.acquire(timeout=30)
        assert not running.entered.acquire(timeout=0.1), "a second piece ran beside decoding"
        running.release.set()
        for piece in pieces:
            piece.result(30)


def test_a_step_of_decoding_bears_only_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "STEP_SHARE_S", 0.0)  # the first piece has spent it
    decoding = Decoding()
    with PacedExecutor(2, decoding, decoding.rest) as executor:
        for piece in range(1, 4):
            executor.submit(int).result(30)
            assert decoding.steps == piece, "a further piece ran in the same step"
        decoding.decoding = False
        executor.submit(int).result(30)
        assert decoding.steps == 3, "it waited for a step though nothing decodes"


def test_pieces_within_the_share_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "STEP_SHARE_S", 1000.0)
    decoding = Decoding()
    with PacedExecutor(2, decoding, decoding.rest) as executor:
        for _ in range(5):
            executor.submit(int).result(30)
    assert decoding.rests == []


def test_a_step_that_does_not_end_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "STEP_SHARE_S", 0.0)
    decoding = Decoding(looks_per_step=10**9)
    with PacedExecutor(2, decoding, decoding.rest) as executor:
        executor.submit(int).result(30)
    assert sum(decoding.rests) == pytest.approx(STEP_WAIT_S, abs=2 * STEP_LOOK_S)


def test_a_lull_between_requests_is_still_beside_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "LULL_S", 1000.0)
    running, decoding = Running(), Decoding()
    with PacedExecutor(3, decoding, decoding.rest) as executor:
        decoding.decoding, decoding.stepped = False, time.monotonic()
        pieces = [executor.submit(running.piece) for _ in range(2)]
        assert running.entered.acquire(timeout=30)
        assert not running.entered.acquire(timeout=0.1), "a second piece ran though clients ask again at once"
        running.release.set()
        for piece in pieces:
            piece.result(30)


def test_clients_that_ask_again_at_once_are_expected() -> None:
    decoding = Decoding(decoding=False, stepped=time.monotonic() + 1000)

    def rest(_seconds: float) -> None:
        decoding.decoding = True

    with PacedExecutor(1, decoding, rest) as executor:
        assert executor.decoding_goes_on()


def test_nobody_is_expected_for_long() -> None:
    decoding = Decoding(decoding=False, stepped=time.monotonic() - pacing.NEXT_S)
    with PacedExecutor(1, decoding, decoding.rest) as executor:
        assert not executor.decoding_goes_on()
    assert decoding.rests == []


def test_giving_way_lets_one_step_end() -> None:
    decoding = Decoding()
    with PacedExecutor(1, decoding, decoding.rest) as executor:
        executor.give_way()
        assert decoding.steps == 1
        decoding.decoding = False
        executor.give_way()
    assert len(decoding.rests) == decoding.looks_per_step
