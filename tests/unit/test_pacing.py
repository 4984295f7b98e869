"""Staging gives way to decoding."""

from __future__ import annotations

import threading

from rowlock.daemon.pacing import REST_MAX_S, PacedExecutor


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
    with PacedExecutor(3, lambda: True) as executor:
        pieces = [executor.submit(running.piece) for _ in range(3)]
        assert running.entered.acquire(timeout=30)
        assert not running.entered.acquire(timeout=0.1), "a second piece ran beside decoding"
        running.release.set()
        for piece in pieces:
            piece.result(30)


def test_it_rests_beside_decoding_only() -> None:
    rests: list[float] = []
    decoding = [True]
    with PacedExecutor(2, lambda: decoding[0], rests.append) as executor:
        assert executor.submit(int).result(30) == 0
        assert len(rests) == 1
        assert 0 <= rests[0] <= REST_MAX_S
        decoding[0] = False
        assert executor.submit(int).result(30) == 0
        assert len(rests) == 1
