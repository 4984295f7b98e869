"""Bodies of requests: JSON objects, within bounds."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from starlette.requests import Request

from rowlock.bindings.checkpoint.header import parse_json_strictly
from rowlock.daemon.http.problems import HttpError

BODY_BYTES_MAX: Final = 4 * 1024 * 1024
BODY_S: Final = 30.0
"""A body that is not here after so long is not waited for."""


async def read_json(request: Request) -> dict[str, Any]:
    """The object that a request carries.

    Raises:
        HttpError: 400, 408, 413 or 415.

    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HttpError(415, "the body has to be application/json", code="unsupported_media_type")
    try:
        async with asyncio.timeout(BODY_S):
            raw = await _read(request)
    except TimeoutError:
        raise HttpError(408, f"the body was not complete after {BODY_S:g} s", code="body_incomplete") from None
    try:
        value = parse_json_strictly(raw)
    except ValueError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise HttpError(400, "the body is not a JSON object", code="invalid_json")
    return value


async def _read(request: Request) -> bytes:
    """The whole body, never more than the bound in memory."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > BODY_BYTES_MAX:
            raise HttpError(
                413, f"the body is longer than {BODY_BYTES_MAX} bytes", code="body_too_large",
                headers={"connection": "close"},
            )  # fmt: skip
    return bytes(raw)
