"""The owner's hold on a source: starts it, and starts it again when it has ended."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from rowlock.daemon.prefill.life import Arrival, Kill, Life, Outbox, SourceEndedError
from rowlock.daemon.prefill.protocol.frames import Frame
from rowlock.daemon.prefill.protocol.hello import SourceFacts
from rowlock.daemon.prefill.protocol.link import Link
from rowlock.daemon.prefill.settings import SourceSettings

BACKOFF_S: Final = (0.1, 0.5, 2.0, 10.0, 30.0)
"""Before the first, second, ... restart in a row; the last goes on. Once a prompt was admitted they begin anew."""
END_S: Final = 5.0
"""In which a source that is told to end has to, before it is killed."""


class SourceState(StrEnum):
    """Where a source is in its life."""

    STARTING = "STARTING"
    READY = "READY"
    ABSENT = "ABSENT"
    CLOSED = "CLOSED"


@dataclass(frozen=True)
class SourceStatus:
    """A source at one moment: a value that anybody may read.

    Attributes:
        state: where it is in its life.
        pid: of its process; 0 while there is none.
        restarts: how often it was started again.
        reason: why it is absent, or empty.
        facts: what it announced; None before.

    """

    state: SourceState
    pid: int = 0
    restarts: int = 0
    reason: str = ""
    facts: SourceFacts | None = None


class SourceKeeper:
    """A source as a child process, and the thread that minds it.

    That thread starts the process, so that the kernel ends the process with it. What arrives is queued for the owner
    thread, which is woken each time.

    Attributes:
        status: now.
        settled: done when it is known whether the source gets ready: its result says what is wrong, or nothing.

    Args:
        settings: how it is started.
        checkpoint: what it loads.
        check: refuses an announcement by raising ValueError, which names the field; called on this keeper's thread.
        wake: called, on this keeper's thread, when there is something for the owner thread.
        log: takes an event name and fields.

    """

    def __init__(
        self, settings: SourceSettings, checkpoint: Path, check: Callable[[SourceFacts], None],
        wake: Callable[[], None], log: Callable[..., None],
    ) -> None:  # fmt: skip
        self.checkpoint = checkpoint
        self.status = SourceStatus(SourceState.STARTING)
        self._settings = settings
        self._check = check
        self._wake = wake
        self._log = log
        self._arrivals: deque[Arrival] = deque()
        self._outbox = Outbox()
        self._lives = 0
        self._quick_ends = 0
        self._doomed = False
        self._heard_of = 0
        self._good = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rowlock-prefill", daemon=True)
        self.settled: Future[str] = Future()

    # The owner thread.

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Arrival | None:
        """The next arrival, if there is one; whoever takes it closes its memory.

        Nothing counts any more that a life had sent when it was ended: the news of its end is next.
        """
        while self._arrivals:
            arrival = self._arrivals.popleft()
            self._heard_of = arrival.life
            if arrival.frame is None:
                self._doomed = False
            if not self._doomed:
                return arrival
            arrival.let_go()
        return None

    @property
    def waiting(self) -> bool:
        """Whether something has arrived."""
        return bool(self._arrivals)

    def send(self, frame: Frame) -> None:
        """Queue a frame for the life that is ready now; should it end before, the frame is lost with it."""
        self._outbox.put(frame)

    def kill(self, reason: str) -> None:
        """End the life of the source that the last arrival came from: it did what no source may."""
        self._doomed = True
        self._outbox.kill = Kill(reason, self._heard_of)
        self._outbox.ring()

    def note_good(self) -> None:
        """A prompt of its became a sequence: should it end, it is started again at once."""
        self._good = True

    def close(self) -> None:
        """Have the source ended for good; returns at once. Idempotent."""
        self._closing.set()
        self._outbox.ring()

    def join(self) -> None:
        """Wait until the source has ended; after ``close``."""
        if self._thread.ident is not None:
            self._thread.join()

    # Its own thread.

    def _run(self) -> None:
        while not self._closing.is_set():
            self._lives += 1
            if self._lives > 1:  # the first life is sent what was asked for before it had begun
                self._outbox.clear()
            self._live()
            if self._good:
                self._good, self._quick_ends = False, 0
            self._closing.wait(BACKOFF_S[min(self._quick_ends, len(BACKOFF_S) - 1)])
            self._quick_ends += 1
        self._outbox.close()
        while (arrival := self.take()) is not None:
            arrival.let_go()
        self._update(SourceState.CLOSED, "it was closed")

    def _live(self) -> None:
        """One life of the source."""
        with ExitStack() as closing:
            try:
                link, other = Link.pair()
                closing.callback(link.close)
                with other:
                    process = self._spawn(other.fileno())
                closing.callback(process.wait)
                closing.callback(process.kill)
                life = Life(self._settings, self._lives, link, self._outbox, self._ready, self._arrive)
                life.run(self._closing.is_set)
            except (OSError, SourceEndedError) as error:
                self._ended(str(error))
            except Exception as error:  # noqa: BLE001 - whatever it is, the next life may go well
                self._ended(f"could not be minded: {error!r}")
            else:
                self._part(link, process)

    def _spawn(self, fd: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            self._settings.command(self.checkpoint, fd, os.getpid()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(fd,),
        )
        self._update(SourceState.STARTING, pid=process.pid)
        return process

    def _part(self, link: Link, process: subprocess.Popen[bytes]) -> None:
        """Let a source end by itself; one that does not is killed."""
        link.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)

    def _ready(self, facts: SourceFacts) -> None:
        self._check(facts)
        self._log("prefill.source_ready", name=facts.name, pid=self.status.pid, checkpoint=str(self.checkpoint))
        self._update(SourceState.READY, pid=self.status.pid, facts=facts)

    def _ended(self, reason: str) -> None:
        reason = reason.encode(errors="backslashreplace").decode()  # it may repeat what a source has sent
        self._log("prefill.source_ended", reason=reason, pid=self.status.pid)
        self._update(SourceState.ABSENT, reason)
        self._arrive(Arrival(None, reason=reason))

    def _arrive(self, arrival: Arrival) -> None:
        self._arrivals.append(replace(arrival, life=self._lives))
        self._wake()

    def _update(self, state: SourceState, reason: str = "", pid: int = 0, facts: SourceFacts | None = None) -> None:
        self.status = SourceStatus(state, pid, self._lives - 1, reason, facts)
        if state is not SourceState.STARTING:
            with suppress(InvalidStateError):  # told before, or nobody wants to know any more
                self.settled.set_result(reason)
        self._wake()
