"""Who may call what on TCP: the common name of a client's certificate has a role.

On the unix socket the file's mode decides, so every caller there may do everything.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, TypeAlias

import grpc

from rowlock.daemon.settings import TlsSettings

OPERATE: Final = frozenset(
    f"/rowlock.v1.OwnerService/{name}"
    for name in ("Transition", "Rollback", "PushRows", "Cancel", "Unload", "ReleaseQuarantine", "PrepareVariant")
)
"""Methods that change the owner; all others are for readers too."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Refuses callers without the role that a method asks for."""

    def __init__(self, tls: TlsSettings) -> None:
        self._readers = set(tls.readers) | set(tls.operators)
        self._operators = set(tls.operators)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _checked(handler, self._operators if handler_call_details.method in OPERATE else self._readers)


def _checked(handler: Any, allowed: set[str]) -> Handler:
    """The same handler, behind a look at the caller's certificate."""

    async def check(context: Any) -> None:
        names = _common_names(context)
        if names is not None and not names & allowed:
            who = ", ".join(sorted(names)) or "a caller without a name"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{who} has no role for this method")

    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    inner = getattr(handler, kind)

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        await check(context)
        answers = inner(request, context)
        if inspect.isawaitable(answers):
            await answers  # it writes to the context itself
            return
        async for answer in answers:
            yield answer

    async def unary(request: Any, context: Any) -> Any:
        await check(context)
        return await inner(request, context)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    checked: Handler = make(
        stream if handler.response_streaming else unary, handler.request_deserializer, handler.response_serializer
    )
    return checked


def _common_names(context: Any) -> set[str] | None:
    """Names in the caller's certificate; None on the unix socket."""
    if context.peer().startswith("unix:"):
        return None
    return {name.decode() for name in context.auth_context().get("x509_common_name", [])}
