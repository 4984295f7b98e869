"""The gRPC server: services, health, reflection; a unix socket, and TCP with mTLS if configured."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from rowlock.daemon.answering.answers import Answers
from rowlock.daemon.api.inference_service import InferenceService
from rowlock.daemon.api.owner_service import OwnerService
from rowlock.daemon.api.roles import RoleInterceptor
from rowlock.daemon.owner.owner import Owner
from rowlock.daemon.settings import Settings, TlsSettings
from rowlock.v1 import inference_pb2, inference_pb2_grpc, owner_pb2, owner_pb2_grpc

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
SOCKET_PATH_MAX: Final = 107
OWNER_SERVICE: Final[str] = owner_pb2.DESCRIPTOR.services_by_name["OwnerService"].full_name
INFERENCE_SERVICE: Final[str] = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


class SocketUnusableError(OSError):
    """The socket's path cannot be listened on."""


class ApiServer:
    """Serves one owner.

    Args:
        owner: the core.
        answers: asks it for tokens.
        settings: socket, TLS, options.
        planners: threads that read targets.
        release: ends the process after a quarantine was released.

    """

    def __init__(
        self, owner: Owner, answers: Answers, settings: Settings, planners: Executor, release: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._server = grpc.aio.server(
            interceptors=[RoleInterceptor(settings.tls)] if settings.tls else [],
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),
            ],
        )
        self._health = HealthServicer()
        service = OwnerService(owner, settings.options, settings.push_bytes_max, planners, release)
        owner_pb2_grpc.add_OwnerServiceServicer_to_server(service, self._server)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(answers), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (OWNER_SERVICE, INFERENCE_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)

    async def start(self) -> None:
        """Listen. The owner service answers at once, inference when told so.

        Raises:
            SocketUnusableError: a live process has the socket, or the path cannot be one.
            OSError: a TLS file cannot be read.

        """
        path = self._settings.socket
        clear_stale_socket(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        before = os.umask(0o777 & ~self._settings.socket_mode)
        try:
            self._server.add_insecure_port(f"unix:{path}")
            if self._settings.tls is not None:
                self._server.add_secure_port(self._settings.tls.address, _credentials(self._settings.tls))
            await self._server.start()
        finally:
            os.umask(before)
        await self.set_ready(False)
        await self._health.set(OWNER_SERVICE, health_pb2.HealthCheckResponse.SERVING)

    async def set_ready(self, ready: bool) -> None:
        """Health of inference, and of the whole (the empty name)."""
        serving = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", INFERENCE_SERVICE):
            await self._health.set(name, serving)

    async def leave(self) -> None:
        """Say NOT_SERVING, for good."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Take no new calls, and end those that run within the grace."""
        await self._server.stop(grace_s)
        self._settings.socket.unlink(missing_ok=True)


def clear_stale_socket(path: Path) -> None:
    """Remove the socket of a dead process; gRPC itself would silently replace a live one.

    Raises:
        SocketUnusableError: it is in use, not a socket, or too long a path.

    """
    if len(os.fsencode(path)) > SOCKET_PATH_MAX:
        raise SocketUnusableError(f"socket: {path} is longer than {SOCKET_PATH_MAX} bytes")
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketUnusableError(f"socket: {path} exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except OSError as error:
            raise SocketUnusableError(f"socket: {path}: {error}") from error
    raise SocketUnusableError(f"socket: another process listens on {path}")


def _credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.certificate.read_bytes())], tls.client_ca.read_bytes(), require_client_auth=True
    )
