"""The HTTP server: a socket of ours, uvicorn on it, and no signal handlers but the daemon's."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from rowlock.daemon.http.app import Probes, build_app
from rowlock.daemon.http.connections import Connection
from rowlock.daemon.http.generating import Service
from rowlock.daemon.http.keys import KeyCheck, read_keys
from rowlock.daemon.settings import HttpSettings

CONNECTIONS_MAX: Final = 1024
"""Connections that are served at the same time; past it callers get 503."""
BACKLOG: Final = 512
LOOK_S: Final = 0.01


class AddressUnusableError(OSError):
    """The address cannot be listened on."""


class HttpServer:
    """Serves one owner over HTTP.

    Args:
        settings: where to listen, and who may call.
        service: generates.
        probes: reads.
        stall_s: a connection whose peer acknowledges nothing for so long is dropped by the kernel.

    Raises:
        OSError: keys or certificate cannot be used, or the address not listened on.

    """

    def __init__(self, settings: HttpSettings, service: Service, probes: Probes, stall_s: float) -> None:
        self._probes = probes
        app: ASGIApp = build_app(service, probes)
        if settings.api_keys is not None:
            app = KeyCheck(app, read_keys(settings.api_keys))
        self._socket = _listen(settings, stall_s)
        config = uvicorn.Config(
            app, http=Connection, ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False,
            server_header=False, limit_concurrency=CONNECTIONS_MAX, backlog=BACKLOG,
            ssl_certfile=settings.certificate, ssl_keyfile=settings.key,
        )  # fmt: skip
        try:
            config.load()
        except (OSError, ssl.SSLError) as error:
            self._socket.close()
            raise OSError(f"http.certificate or http.key: {error}") from error
        self._server = _Server(config)
        self._task: asyncio.Task[None] | None = None
        scheme = "https" if settings.certificate else "http"
        host, port = self._socket.getsockname()[:2]
        self.url = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    async def start(self) -> None:
        """Answer from now on. Nothing is ready before the owner says so."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(LOOK_S)
        if self._task.done():
            self._task.result()

    def leave(self) -> None:
        """Say that nothing is ready, for good."""
        self._probes.stopping = True

    async def stop(self, grace_s: float) -> None:
        """Take no new connections, and end those that there are within the grace."""
        if self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._task


class _Server(uvicorn.Server):
    """uvicorn's server, which would take SIGTERM and SIGINT for itself."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(settings: HttpSettings, stall_s: float) -> socket.socket:
    where = f"http.listen: {settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # inherited by connections: what a reader does not take is not kept for ever
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))
            listening.bind(address)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise AddressUnusableError(f"{where}: {error}") from error
    return listening
