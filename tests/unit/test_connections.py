"""Callers that connect and do not ask."""

from __future__ import annotations

import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from rowlock.daemon.http import connections
from rowlock.daemon.http.connections import Connection

WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


async def answer(_scope: object, _receive: object, send: object) -> None:
    assert callable(send)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def heard(*sent: bytes) -> bytes:
    """What a caller hears until the connection ends, which it does not end itself."""
    config = uvicorn.Config(answer, http=Connection, ws="none", lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.load()
    state = ServerState()

    def connected() -> Connection:
        return Connection(config=config, server_state=state, app_state={})

    server = await asyncio.get_running_loop().create_server(connected, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        said = b""
        for part in sent:
            writer.write(part)
            if part.endswith(b"\r\n\r\n"):
                said += await reader.readuntil(b"ok")
        said += await reader.read()
        writer.close()
    assert not state.connections
    return said


@pytest.mark.parametrize("sent", [(), (b"GET / HT",), (WHOLE[:-2],), (WHOLE, b"G"), (WHOLE, WHOLE, WHOLE[:-1])])
def test_a_head_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, sent: tuple[bytes, ...]) -> None:
    """The connection counts against the most that are served: kept for ever, some would keep everybody else out."""
    monkeypatch.setattr(connections, "HEAD_S", 0.1)
    assert asyncio.run(heard(*sent)).count(b"HTTP/1.1 200") == sent.count(WHOLE)
