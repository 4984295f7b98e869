"""Refusals as gRPC statuses with one ``ErrorInfo``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2

from rowlock.daemon.owner.outcome import reason_of
from rowlock.v1.errors import DOMAIN, REASONS, OwnerError

DETAILS_KEY: Final = "grpc-status-details-bin"
TEXT_MAX: Final = 1000
"""Characters of a message: a status travels in headers, which are limited."""


@asynccontextmanager
async def refusals(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """End the call with the status of whatever goes wrong in the block."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:  # noqa: BLE001 - the edge of a call
        await abort(context, error)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End a call with an error's status code, message, reason and hint."""
    known = error if isinstance(error, OwnerError) else OwnerError(reason_of(error), str(error) or repr(error))
    code, message = REASONS[known.reason].status, str(known)[:TEXT_MAX]
    info = error_details_pb2.ErrorInfo(
        reason=known.reason.value, domain=DOMAIN, metadata={"hint": known.hint[:TEXT_MAX]}
    )
    detail = any_pb2.Any()
    detail.Pack(info)
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    await context.abort(code, message, ((DETAILS_KEY, status.SerializeToString()),))
    raise AssertionError("abort returned")
