"""One life of a source: from its announcement to its end, on its keeper's thread."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from rowlock.daemon.prefill.protocol.frames import (
    Done,
    Failed,
    Frame,
    FrameError,
    Hello,
    Memory,
    Prefill,
    Release,
    Span,
)
from rowlock.daemon.prefill.protocol.hello import SourceFacts, parse_hello
from rowlock.daemon.prefill.protocol.link import Link, Received
from rowlock.daemon.prefill.protocol.memory import MemoryRefusedError, OwnerMemory
from rowlock.daemon.prefill.settings import SourceSettings

FRAMES_A_TURN: Final = 64
"""Frames taken in before what is to be sent gets its turn."""


class SourceEndedError(Exception):
    """The life of a source is over; the message says why."""


@dataclass(frozen=True)
class Arrival:
    """Something that came from a source, or the news that it has ended.

    Attributes:
        frame: what it sent; None: it has ended, and all that it had not finished is lost.
        memory: what came with a :class:`Memory`; whoever takes the arrival lets it go.
        reason: why it has ended, or why its memory was refused.
        life: the number of the life that it came from.

    """

    frame: Memory | Span | Done | Failed | None
    memory: OwnerMemory | None = None
    reason: str = ""
    life: int = 0

    def let_go(self) -> None:
        if self.memory is not None:
            self.memory.close()


@dataclass(frozen=True)
class Kill:
    """An order to end the life with this number; later ones go on."""

    reason: str
    life: int


class Outbox:
    """What a source shall be sent: filled by the owner thread, emptied by the keeper's, with a bell in between.

    Attributes:
        kill: an order that does not wait for what is to be sent.

    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Frame] = deque()
        self.kill: Kill | None = None
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def put(self, item: Frame) -> None:
        with self._lock:
            self._waiting.append(item)
        self.ring()

    def first(self) -> Frame | None:
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def drop_first(self) -> None:
        with self._lock:
            self._waiting.popleft()

    def clear(self) -> None:
        with self._lock:
            self._waiting.clear()

    def ring(self) -> None:
        with self._lock:
            if self.bell >= 0:
                os.eventfd_write(self.bell, 1)

    def silence(self) -> None:
        """Take note of the bell."""
        try:
            os.eventfd_read(self.bell)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Nobody reads any more."""
        with self._lock:
            os.close(self.bell)
            self.bell = -1
            self._waiting.clear()


class Silence:
    """For how long a source has said nothing while it had something to say.

    Being relieved of that does not make it forgotten: a source that hangs is found out by several short requests too.

    Args:
        now: seconds of a clock.

    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._before = 0.0
        self._since: float | None = now()

    @property
    def expected(self) -> bool:
        """Whether it has something to say."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        return self._before + (self._now() - self._since if self._since is not None else 0.0)

    def broken(self) -> None:
        """It has said something."""
        self._before = 0.0
        if self._since is not None:
            self._since = self._now()

    def expect(self, *, something: bool) -> None:
        """Whether it has something to say, from now on."""
        if something == self.expected:
            return
        self._before, self._since = self.seconds, self._now() if something else None


class Life:
    """Reads what a source sends, sends what it shall have, and gives it up when it is silent.

    Args:
        settings: how long it may take.
        number: of this life.
        link: to its process.
        outbox: what it shall be sent.
        ready: told, once, what it announced; refuses it by raising ValueError.
        arrive: told of everything after that.

    """

    def __init__(
        self, settings: SourceSettings, number: int, link: Link, outbox: Outbox, ready: Callable[[SourceFacts], None],
        arrive: Callable[[Arrival], None],
    ) -> None:  # fmt: skip
        self._settings = settings
        self._number = number
        self._link = link
        self._outbox = outbox
        self._ready = ready
        self._arrive = arrive
        self._announced = False
        self._working: set[int] = set()
        self._silence = Silence()

    def run(self, closing: Callable[[], bool]) -> None:
        """Until ``closing``.

        Raises:
            SourceEndedError: it ended before, or has to.

        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ)
            selector.register(self._outbox.bell, selectors.EVENT_READ)
            while not closing():
                self._outbox.silence()
                blocked = self._send_all()
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if blocked else 0)
                selector.modify(self._link, events)
                self._expect(blocked=blocked)
                selector.select(self._patience())
                self._receive_some()

    def _expect(self, *, blocked: bool) -> None:
        """It has something to say while it has a prompt, or has no room for what it is sent."""
        self._silence.expect(something=blocked or not self._announced or bool(self._working))

    def _patience(self) -> float | None:
        """Seconds until it has been silent for too long; None: it has nothing to say.

        Raises:
            SourceEndedError: it has been.

        """
        if not self._silence.expected:
            return None
        allowed = self._settings.silence_s if self._announced else self._settings.start_s
        left = allowed - self._silence.seconds
        if left <= 0:
            what = "said nothing of the prompt that it has" if self._announced else "did not announce itself"
            raise SourceEndedError(f"{what} for {allowed} s")
        return left

    def _send_all(self) -> bool:
        """Send what waits; returns whether some of it has to wait for room."""
        kill = self._outbox.kill
        if kill is not None and kill.life == self._number:
            raise SourceEndedError(kill.reason)
        while self._announced:
            item = self._outbox.first()
            if item is None:
                return False
            try:
                self._send(item)
            except BlockingIOError:
                return True
            except OSError as error:
                raise SourceEndedError(f"cannot be reached: {error}") from error
            self._outbox.drop_first()
        return False

    def _send(self, frame: Frame) -> None:
        self._link.send(frame, wait=False)
        if isinstance(frame, Prefill):
            self._working.add(frame.request)
        elif isinstance(frame, Release):
            self._working.discard(frame.request)

    def _receive_some(self) -> None:
        for _ in range(FRAMES_A_TURN):
            try:
                received = self._link.receive(wait=False)
            except BlockingIOError:
                return
            except FrameError as error:
                raise SourceEndedError(f"sent something that is no frame: {error}") from error
            except OSError as error:
                raise SourceEndedError(f"cannot be reached: {error}") from error
            if received is None:
                raise SourceEndedError("closed its end")
            self._silence.broken()
            self._take(received)

    def _take(self, received: Received) -> None:
        frame = received.frame
        if isinstance(frame, Hello):
            self._announce(frame)
        elif not self._announced:
            if received.fd >= 0:
                os.close(received.fd)
            raise SourceEndedError(f"sent {type(frame).__name__.lower()} before its hello")
        elif isinstance(frame, Memory):
            self._arrive(_attached(frame, received.fd, self._settings.memory_max))
        elif isinstance(frame, Prefill | Release):
            raise SourceEndedError(f"sent {type(frame).__name__.lower()}, which only an owner does")
        else:
            if not isinstance(frame, Span):
                self._working.discard(frame.request)
            self._arrive(Arrival(frame))

    def _announce(self, hello: Hello) -> None:
        if self._announced:
            raise SourceEndedError("announced itself twice")
        try:
            self._ready(parse_hello(hello))
        except (FrameError, ValueError) as error:
            raise SourceEndedError(f"was refused: {error}") from error
        self._announced = True


def _attached(frame: Memory, fd: int, most: int) -> Arrival:
    if frame.nbytes > most:
        os.close(fd)
        return Arrival(frame, reason=f"memory has {frame.nbytes} bytes; {most} are allowed (prefill.memory_max)")
    try:
        return Arrival(frame, OwnerMemory.attach(fd, frame.nbytes))
    except (MemoryRefusedError, OSError, ValueError, OverflowError) as error:
        return Arrival(frame, reason=str(error))
