"""A source that does wrong when it is told to: the real engine and the real loop, over a link that a file can make lie.

``--option orders=FILE``. While the file is not there nothing happens. Its content is JSON::

    {"fault": NAME, "at": 0}

The fault happens once, at the span with that number of a prompt; then the file is gone. A source that dies, or is held
at a gate, may do so at what comes after the last span too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rowlock.daemon.prefill import decoder_engine, worker
from rowlock.daemon.prefill.engine import Engine, EngineError, EngineOptions
from rowlock.daemon.prefill.protocol.frames import (
    FRAME_MAX,
    HEADER,
    MAGIC,
    VERSION,
    Done,
    Frame,
    Hello,
    Memory,
    Release,
    Span,
    pack,
)
from rowlock.daemon.prefill.protocol.hello import parse_hello
from rowlock.daemon.prefill.protocol.link import Link

SPAN_FAULTS: dict[str, Callable[[Span], list[Span]]] = {
    "drop": lambda span: [],
    "duplicate": lambda span: [span, span],
    "overlap": lambda span: [span, replace(span, token=span.token_stop - 1)],
    "layer out of bounds": lambda span: [replace(span, layer=span.layer + 1000, layer_stop=span.layer_stop + 1000)],
    "token out of bounds": lambda span: [replace(span, token_stop=span.token_stop + 1)],
    "wrong dtype": lambda span: [replace(span, dtype=3)],
    "wrong shape": lambda span: [replace(span, kv_heads=span.kv_heads + 1)],
    "wrong generation": lambda span: [replace(span, generation=span.generation + 1)],
    "another's request": lambda span: [replace(span, request=span.request + 1)],
}
"""What a span becomes: each is that request's own failure."""
LINK_FAULTS: dict[str, Callable[[Span], bytes]] = {
    "wrong request": lambda span: pack(replace(span, request=span.request + 1_000_000)),
    "truncated": lambda span: pack(span)[:-3],
    "oversized": lambda _span: b"\0" * (FRAME_MAX + 1),
    "unknown": lambda _span: HEADER.pack(MAGIC, VERSION, 77, 0, 0),
    "nonsense": lambda _span: b"\xff" * 100,
    "an owner's frame": lambda span: pack(Release(span.request, span.generation)),
}
"""What is sent instead of a span: each ends the source."""
SIGNALS = {"die": signal.SIGKILL, "stop": signal.SIGSTOP}


class Saboteur:
    """Stands before ``Link.send`` in the source's process."""

    def __init__(self, orders: Path, send: Callable[..., None]) -> None:
        self._orders = orders
        self._send = send
        self._spans = 0
        self._vocab = 0

    def send(self, link: Link, frame: Frame, fd: int = -1, *, wait: bool = True) -> None:
        if isinstance(frame, Memory):
            self._spans = 0
        if isinstance(frame, Hello):
            self._vocab = parse_hello(frame).geometry.vocab
        order = self._order(frame)
        if isinstance(frame, Span):
            self._spans += 1
        if order is None:
            self._send(link, frame, fd, wait=wait)
            return
        self._orders.unlink()
        self._obey(link, order["fault"], frame)

    def _order(self, frame: Frame) -> dict[str, Any] | None:
        try:
            order: dict[str, Any] = json.loads(self._orders.read_text())
        except FileNotFoundError:
            return None
        wanted = {"two dones": Done, "gate": Span | Done, "die": Span | Done}.get(order["fault"], Span)
        return order if isinstance(frame, wanted) and order.get("at", 0) in {self._spans, None} else None

    def _obey(self, link: Link, fault: str, frame: Any) -> None:
        if fault in SPAN_FAULTS:
            for span in SPAN_FAULTS[fault](frame):
                self._send(link, span)
        elif fault in LINK_FAULTS:
            with socket.socket(fileno=os.dup(link.fileno())) as raw:
                raw.send(LINK_FAULTS[fault](frame))
        elif fault in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault])
        elif fault == "error":
            raise EngineError("the device is tired")
        elif fault == "gate":
            with open(self._orders.with_suffix(".gate")):
                """Somebody has opened it."""
            self._send(link, frame)
        elif fault == "early done":
            self._send(link, Done(frame.request, frame.generation, self._spans - 1, frame.dtype, self._vocab, 0))
        else:
            assert fault == "two dones", fault
            self._send(link, frame)
            self._send(link, frame)


def create(options: EngineOptions) -> Engine:
    """The factory."""
    extra = dict(options.extra)
    saboteur = Saboteur(Path(extra.pop("orders")), Link.send)
    Link.send = lambda *args, **kinds: saboteur.send(*args, **kinds)  # type: ignore[method-assign] # noqa: PLW0108
    if extra.pop("deaf", ""):
        worker.Worker._take = _take_but_releases(worker.Worker._take)  # type: ignore[method-assign]
    return decoder_engine.create(replace(options, extra=extra))


def _take_but_releases(take: Callable[..., None]) -> Callable[..., None]:
    """A source that does not hear when a prompt is not wanted any more."""

    def deaf(self: worker.Worker, frame: Frame) -> None:
        if not isinstance(frame, Release):
            take(self, frame)

    return deaf
