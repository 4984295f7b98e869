"""The owner's hold on the process that stages."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.reduction import send_handle
from typing import Any, Final

from rowlock.bindings.checkpoint.hashing import Progress, no_progress
from rowlock.bindings.children import end_of
from rowlock.daemon.staging.orders import Answer, Done, Failed, Order, Step
from rowlock.v1.errors import OwnerError, Reason

NICENESS: Final = 15
"""How much nicer than its owner. Beside two decoding threads on two processors it reads and proves 270 MB in 8 to 9 s,
and steps take as long as without it; at 5 it takes 5 s, but steps take a quarter longer, and one in ten twice that."""
NICENESS_MAX: Final = 19


class StagingProcess:
    """A child process that carries out orders, of one transition or one manifest at a time.

    Made on a thread that lives as long as the owner: the kernel ends the child with that thread.

    Args:
        threads: of its own that it may use.

    Raises:
        OSError: it cannot be started.

    """

    def __init__(self, threads: int) -> None:
        self._link, there = multiprocessing.Pipe()
        try:
            with there:
                arguments = there.fileno(), os.getpid(), threads
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "rowlock.daemon.staging.child", *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(there.fileno(),),
                )
            _make_nicer(self._process.pid)
        except BaseException:
            self._link.close()
            raise
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[Future[Any], Progress]] = {}
        self._last = 0
        self._end: OwnerError | None = None
        self._failed = False
        threading.Thread(target=self._listen, name="rowlock-staging", daemon=True).start()

    def submit(self, order: Order, descriptors: Sequence[int] = (), progress: Progress = no_progress) -> Future[Any]:
        """Have an order carried out. Copies of the descriptors go along.

        Returns:
            Its result; or what it raised, or OwnerError STAGING_FAILED, when the process ended before.

        """
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._last += 1
            if self._end is not None:
                future.set_exception(self._end)
                return future
            self._waiting[self._last] = future, progress
            try:
                self._link.send((self._last, order, len(descriptors)))
                for descriptor in descriptors:
                    send_handle(self._link, descriptor, self._process.pid)
            except OSError:
                self._process.kill()  # whoever listens says why
        return future

    @property
    def alive(self) -> bool:
        return self._end is None and self._process.poll() is None

    @property
    def idle(self) -> bool:
        """Whether it lives and has carried out all that it was told. One that failed once may still hold images."""
        with self._lock:
            return self.alive and not self._waiting and not self._failed

    def close(self) -> None:
        """End it; returns at once. Idempotent."""
        self._process.kill()

    def _listen(self) -> None:
        """Hand out answers until the process has ended."""
        with suppress(Exception):  # EOFError when it has ended; what else is no answer ends it
            while True:
                self._take(self._link.recv())
        self._process.kill()
        end = OwnerError(Reason.STAGING_FAILED, f"the process that stages {end_of(self._process.wait())}")
        with self._lock:
            self._end = end
            waiting, self._waiting = self._waiting, {}
            self._link.close()
        for future, _ in waiting.values():
            future.set_exception(end)

    def _take(self, answer: Answer) -> None:
        with self._lock:
            future, progress = self._waiting[answer.number]
            if not isinstance(answer, Step):
                del self._waiting[answer.number]
            self._failed |= isinstance(answer, Failed)
        match answer:
            case Step():
                self._report(answer, future, progress)
            case Done():
                future.set_result(answer.result)
            case Failed():
                future.set_exception(answer.error)

    def _report(self, step: Step, future: Future[Any], progress: Progress) -> None:
        """Whoever is told may call the whole thing off by raising."""
        try:
            progress(step.count)
        except Exception as error:  # noqa: BLE001 - it is whoever waits that hears of it
            with self._lock:
                del self._waiting[step.number]
            future.set_exception(error)
            self.close()


def _make_nicer(pid: int) -> None:
    """From outside, so that not even its imports run at the owner's priority."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(ProcessLookupError):
        os.setpriority(os.PRIO_PROCESS, pid, min(own + NICENESS, NICENESS_MAX))
