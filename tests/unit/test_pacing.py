"""Staging gives way to decoding."""

from __future__ import annotations

import threading

from rowlock.daemon.pacing import BURST_S, REST_S, PacedExecutor


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
    with PacedExecutor(3, lambda: False) as executor:
        pieces = [executor.submit(running.piece) for _ in range(3)]
        for _ in pieces:
            assert running.entered.acquire(timeout=30)
        running.release.set()


def test_one_thread_while_requests_run() -> None:
    running = Running()
    with PacedExecutor(3, lambda: True, lambda: 0.0) as executor:
        pieces = [executor.submit(running.piece) for _ in range(3)]
        assert running.entered.acquire(timeout=30)
        assert not running.entered.acquire(timeout=0.1), "a second piece ran beside decoding"
        assert executor.wanted == 1
        running.release.set()
        for piece in pieces:
            piece.result(30)
        assert executor.wanted == 0


def test_it_rests_while_requests_run_and_goes_on_after() -> None:
    now = [BURST_S + REST_S / 2]
    with PacedExecutor(2, lambda: True, lambda: now[0]) as executor:
        piece = executor.submit(int)
        assert executor.wanted == 0, "decoding may use every thread meanwhile"
        assert not piece.done()
        now[0] = 0.0
        assert piece.result(30) == 0


def test_it_rests_for_nobody() -> None:
    with PacedExecutor(2, lambda: False, lambda: BURST_S + REST_S / 2) as executor:
        assert executor.submit(int).result(30) == 0
