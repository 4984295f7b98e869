"""Commands to the owner thread, and the futures that answer them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rowlock.v1.errors import OwnerError, Reason

T = TypeVar("T")

COMMANDS_MAX: Final = 1024
"""Commands that may wait for the owner thread; past it callers are refused."""


@dataclass(frozen=True)
class Command:
    """Something for the owner thread to do.

    Attributes:
        action: run on the owner thread.
        refuse: run instead, on any thread, when it will not be.

    """

    action: Callable[[], None]
    refuse: Callable[[Exception], None]


class Mailbox:
    """A bounded queue with a wake-up, closed once. Nothing put in is ever left unanswered."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._commands: deque[Command] = deque()
        self._woken = False
        self._closed: OwnerError | None = None

    def put(self, command: Command) -> None:
        """Queue a command, or refuse it at once."""
        with self._condition:
            refusal = self._closed
            if refusal is None and len(self._commands) >= COMMANDS_MAX:
                refusal = OwnerError(Reason.QUEUE_FULL, f"{COMMANDS_MAX} commands are waiting already")
            if refusal is None:
                self._commands.append(command)
                self._condition.notify()
                return
        command.refuse(refusal)

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def take(self, *, wait: bool) -> Command | None:
        """The next command; with ``wait``, not before there is one, or a wake-up, or the closing.

        One at a time: what is still here when the thread ends can still be refused.
        """
        with self._condition:
            if wait:
                self._condition.wait_for(lambda: self._commands or self._woken)
            self._woken = False
            return self._commands.popleft() if self._commands else None

    def close(self, refusal: OwnerError) -> None:
        """Refuse what waits, and all that is still to come."""
        with self._condition:
            self._closed = refusal
            commands = list(self._commands)
            self._commands.clear()
            self._woken = True
            self._condition.notify()
        for command in commands:
            command.refuse(refusal)

    @property
    def closed(self) -> bool:
        return self._closed is not None


class Promises:
    """Futures handed out and not yet answered, so that none is forgotten when the thread ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Future[Any]] = set()

    def new(self) -> Future[Any]:
        """A future that its holder cannot cancel: it is answered, whoever has stopped listening."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._open.add(future)
        return future

    def keep(self, future: Future[Any], result: object) -> None:
        if self._take(future):
            future.set_result(result)

    def fail(self, future: Future[Any], error: BaseException) -> None:
        if self._take(future):
            future.set_exception(error)

    def fail_all(self, error: OwnerError) -> None:
        with self._lock:
            futures = list(self._open)
        for future in futures:
            self.fail(future, error)

    def _take(self, future: Future[Any]) -> bool:
        with self._lock:
            known = future in self._open
            self._open.discard(future)
            return known
