"""The gRPC server: services, health, reflection, one unix socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from rowlock.daemon.api.inference_service import InferenceService
from rowlock.daemon.api.owner_service import OwnerService
from rowlock.daemon.owner.owner import Owner
from rowlock.v1 import inference_pb2, inference_pb2_grpc, owner_pb2, owner_pb2_grpc

MESSAGE_BYTES_MAX: Final = 4 * 1024 * 1024
OWNER_SERVICE: Final[str] = owner_pb2.DESCRIPTOR.services_by_name["OwnerService"].full_name
INFERENCE_SERVICE: Final[str] = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


class SocketInUseError(OSError):
    """Another process listens on the socket."""


class ApiServer:
    """Serves one owner on a unix socket of mode 0600."""

    def __init__(self, owner: Owner, path: Path) -> None:
        self._path = path
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
                ("grpc.so_reuseport", 0),
            ]
        )
        self._health = HealthServicer()
        owner_pb2_grpc.add_OwnerServiceServicer_to_server(OwnerService(owner), self._server)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceService(owner), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (OWNER_SERVICE, INFERENCE_SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)

    async def start(self) -> None:
        """Listen. The owner service answers at once, inference when told so.

        Raises:
            SocketInUseError: a live process has the socket.

        """
        _clear_stale_socket(self._path)
        before = os.umask(0o177)
        try:
            self._server.add_insecure_port(f"unix:{self._path}")
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

    async def stop(self, grace_s: float) -> None:
        """Say NOT_SERVING, take no new calls, end those that run within the grace."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)
        self._path.unlink(missing_ok=True)


def _clear_stale_socket(path: Path) -> None:
    """Remove the socket of a dead process; gRPC itself would silently replace a live one."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise SocketInUseError(f"{path}: another process listens there")
