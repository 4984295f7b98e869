"""Connections of callers who may be slow, or gone."""

from __future__ import annotations

import asyncio
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S: Final = 10.0
"""A request whose line and headers are not here after so long is not waited for."""
AHEAD_BYTES_MAX: Final = 64 * 1024
"""Of requests that are sent while one before them is answered; past it nothing is read until that has ended."""


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 with a limit on the head of a request, and an eye on the caller while one is answered.

    uvicorn would wait for a head for ever; and once a second request is there it stops to read, and misses a hang-up.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._limit_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_head()
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= AHEAD_BYTES_MAX:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def _limit_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
