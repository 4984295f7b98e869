"""Refusals as HTTP statuses with OpenAI's error object."""

from __future__ import annotations

import json
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.responses import Response

from rowlock.daemon.owner.outcome import reason_of
from rowlock.v1.errors import REASONS, OwnerError, Reason

RETRY_S: Final = {Reason.QUEUE_FULL: 1, Reason.DRAINED: 1}
RETRY_LATER_S: Final = 5
"""When to ask again: soon where others only have to end, later where somebody has to act."""
TYPES: Final = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}
"""OpenAI's ``type`` by status; below 500 the rest is the caller's mistake, from there on the server's."""
CODES: Final = {Reason.CONTEXT_EXCEEDED: "context_length_exceeded"}
"""OpenAI's name where it has one."""


class HttpError(Exception):
    """A request that is not answered.

    Attributes:
        status: of HTTP.
        param: the field it is about, or None.
        code: stable; clients match on it.
        headers: to send with it.

    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        # in ASCII: what a caller sent may be no valid text, and is quoted
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


def invalid(field: str, problem: str, code: str = "invalid_value") -> HttpError:
    """A field that cannot be what it is."""
    return HttpError(400, f"{field}: {problem}", param=field, code=code)


def problem_of(error: Exception) -> HttpError:
    """What a caller is told of any failure."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, HTTPException):
        return HttpError(error.status_code, error.detail, code="http_error", headers=dict(error.headers or {}))
    reason = reason_of(error)
    hint = error.hint if isinstance(error, OwnerError) else REASONS[reason].hint
    status, headers = REASONS[reason].http_status, {}
    if status in {429, 503}:
        headers["retry-after"] = str(RETRY_S.get(reason, RETRY_LATER_S))
    if status == 409:
        headers["x-should-retry"] = "false"  # OpenAI's clients would ask the same again
    message = str(error) or repr(error)
    return HttpError(status, f"{message} ({hint})", code=CODES.get(reason, reason.lower()), headers=headers)
