"""Who is to be woken when the journal has news of a transition."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Followers:
    """Listeners by transition. Any thread; a listener must not block."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _listeners: dict[str, list[Callable[[], None]]] = field(default_factory=dict)

    def add(self, transition: str, listener: Callable[[], None]) -> None:
        with self._lock:
            self._listeners.setdefault(transition, []).append(listener)

    def remove(self, transition: str, listener: Callable[[], None]) -> None:
        with self._lock:
            left = [item for item in self._listeners.get(transition, []) if item is not listener]
            if left:
                self._listeners[transition] = left
            else:
                self._listeners.pop(transition, None)

    def notify(self, transition: str) -> None:
        with self._lock:
            listeners = list(self._listeners.get(transition, []))
        for listener in listeners:
            listener()

    def notify_all(self) -> None:
        with self._lock:
            transitions = list(self._listeners)
        for transition in transitions:
            self.notify(transition)
