"""Refusals as gRPC statuses with one ``ErrorInfo``."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from rowlock.v1.errors import DOMAIN, REASONS, OwnerError

_DETAILS_KEY = "grpc-status-details-bin"


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: OwnerError) -> NoReturn:
    """End a call with an error's status code, message, reason and hint."""
    code = REASONS[error.reason].status
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata={"hint": error.hint})
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=code.value[0], message=str(error), details=[detail])
    await context.abort(code, str(error), ((_DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")
