"""A daemon as a child process, for the demo: its own directories, ended with its parent's block."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rowlock.cli.client import EXIT_UNREACHABLE, Client, ClientError

START_LOOKS: Final = 240
"""Of a second each: loading torch and a vendor's library takes minutes on a machine that is busy with much else. Looks
are counted, not time, of which a machine may spend some asleep."""
STOP_S: Final = 30.0
LOG_TAIL: Final = 2000


@dataclass(frozen=True)
class Launcher:
    """Another way to start the daemon than as whoever asks for it.

    Attributes:
        command: before the interpreter's path; it becomes another user.
        user: that user's id; it is given the directories of the daemon.

    """

    command: tuple[str, ...]
    user: int


class DaemonProcess:
    """``rowlock serve`` in a child process, ready when the block begins.

    Args:
        state: state directory and log.
        options: further options of ``rowlock serve``.
        environment: further variables.
        ready: wait until a model is resident; else only until the daemon answers.
        launcher: None: it runs as whoever asks for it.

    """

    def __init__(
        self,
        state: Path,
        options: list[str],
        environment: Mapping[str, str] | None = None,
        *,
        ready: bool = True,
        launcher: Launcher | None = None,
    ) -> None:
        self._state = state
        self.log = state / "daemon.log"
        self._options = options
        self._environment = environment or {}
        self._service = "" if ready else "rowlock.v1.OwnerService"
        self._launcher = launcher

    def __enter__(self) -> Self:
        self._state.mkdir(parents=True, exist_ok=True)
        # Socket paths are limited to 107 bytes, so not below the state directory.
        self._runtime = tempfile.TemporaryDirectory(prefix="rowlock-")
        socket = Path(self._runtime.name) / "cpu.sock"
        if self._launcher is not None:
            for directory in (self._state, Path(self._runtime.name)):
                os.chown(directory, self._launcher.user, -1)
        arguments = ["serve", "--state", str(self._state), "--socket", str(socket), *self._options]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*(self._launcher.command if self._launcher else ()), sys.executable, "-m", "rowlock.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "ROWLOCK_RUNTIME_DIR": self._runtime.name, **self._environment},
            )
        self.client = Client(f"unix:{socket}", timeout_s=None)
        try:
            self._wait_ready()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self.client.close()
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._runtime.cleanup()

    def _wait_ready(self) -> None:
        """Until the daemon, or a model in it, is healthy. Raises ClientError with the end of the log."""
        with grpc.insecure_channel(self.client.endpoint) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for _ in range(START_LOOKS):
                if self.process.poll() is not None:
                    break
                try:
                    request = health_pb2.HealthCheckRequest(service=self._service)
                    for answer in stub.Watch(request, timeout=1, wait_for_ready=True):
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                except grpc.RpcError:
                    continue
        tail = self.log.read_text(errors="replace")[-LOG_TAIL:]
        raise ClientError(f"the daemon did not become ready; its log {self.log} ends:\n{tail}", EXIT_UNREACHABLE)
