"""Talking to a daemon: the channel, and errors as exit codes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from rowlock.v1 import inference_pb2_grpc, owner_pb2, owner_pb2_grpc
from rowlock.v1.errors import DOMAIN, REASONS, Reason

EXIT_REFUSED, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 3, 8, 130
OUTCOME_EXIT: Final = {
    owner_pb2.TRANSITION_STATE_PUBLISHED: 0,
    owner_pb2.TRANSITION_STATE_NOOP: 0,
    owner_pb2.TRANSITION_STATE_ROLLED_BACK: 4,
    owner_pb2.TRANSITION_STATE_UNLOADED: 5,
    owner_pb2.TRANSITION_STATE_QUARANTINED: 6,
    owner_pb2.TRANSITION_STATE_CANCELLED: 9,
    owner_pb2.TRANSITION_STATE_FAILED: 9,
}
"""Exit code by terminal state."""


class ClientError(Exception):
    """What the command line tells its user before it exits.

    Attributes:
        hint: what to try next, or empty.
        reason: from the error table, or empty.

    """

    def __init__(self, message: str, exit_code: int, hint: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.hint = hint
        self.reason = reason


def default_endpoint() -> str:
    """The endpoint of the ``cpu`` owner of this user."""
    directory = os.environ.get("ROWLOCK_RUNTIME_DIR") or (
        "/run/rowlock" if os.geteuid() == 0 else f"/run/user/{os.geteuid()}/rowlock"
    )
    return f"unix:{directory}/cpu.sock"


class Client:
    """Stubs of one daemon.

    Args:
        endpoint: ``unix:PATH``.
        timeout_s: for each call; None waits for ever.

    """

    def __init__(self, endpoint: str, timeout_s: float | None) -> None:
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self._channel = grpc.insecure_channel(endpoint)
        self.owner = owner_pb2_grpc.OwnerServiceStub(self._channel)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def call(self, method: Callable[..., Any], request: Any) -> Any:
        """One answer. Raises ClientError."""
        with self._errors():
            return method(request, timeout=self.timeout_s)

    def stream(self, method: Callable[..., Any], request: Any) -> Iterator[Any]:
        """Answers as they come. Raises ClientError."""
        with self._errors():
            call = method(request, timeout=self.timeout_s)
            try:
                yield from call
            finally:
                call.cancel()  # whoever stops reading wants no more

    def close(self) -> None:
        self._channel.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._client_error(error) from error

    def _client_error(self, error: grpc.RpcError) -> ClientError:
        info = _error_info(error)
        if info is not None:
            reason = Reason(info.reason)
            exit_code = REASONS[reason].exit_code
            # A refusal has changed nothing, whatever the same reason means for a transition.
            exit_code = EXIT_REFUSED if exit_code == 9 else exit_code
            return ClientError(error.details() or "", exit_code, info.metadata.get("hint", ""), reason.value)
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return ClientError(
                f"no answer within {self.timeout_s} s; what was asked for may go on",
                EXIT_UNREACHABLE,
                "`rowlock history` shows whether a transition has begun",
            )
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return ClientError(
                f"no daemon answers at {self.endpoint}",
                EXIT_UNREACHABLE,
                "start one with `rowlock serve`, or give its --endpoint",
            )
        return ClientError(f"{error.code().name}: {error.details()}", EXIT_REFUSED)


def _error_info(error: grpc.RpcError) -> error_details_pb2.ErrorInfo | None:
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN and info.reason in set(Reason):
            return info
    return None
