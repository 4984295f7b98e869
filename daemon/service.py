"""The daemon process: wiring, start and stop.

Start: log, signals, lock, journal, binding, socket, health, then recovery and load on the
owner thread; inference is declared healthy when a model is resident. Stop: not serving,
transition cancelled before its first write or else finished, device closed.
"""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import structlog

from rowlock.bindings.checkpoint.hashing import Hasher
from rowlock.bindings.plan import Policy
from rowlock.daemon.api.server import ApiServer
from rowlock.daemon.devices import open_binding
from rowlock.daemon.lock import DeviceLock
from rowlock.daemon.logs import configure_logs
from rowlock.daemon.owner.context import Context, SystemClock, random_id
from rowlock.daemon.owner.owner import Owner
from rowlock.daemon.owner.planning import Planner
from rowlock.daemon.owner.states import OwnerState
from rowlock.daemon.owner.stores import Stores
from rowlock.daemon.owner.target import TargetLoader
from rowlock.daemon.settings import Settings
from rowlock.journal.files import OsFiles
from rowlock.journal.journal import Journal
from rowlock.v1.errors import OwnerError

WORKERS: Final = 4
GRACE_S: Final = 2.0


def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT.

    Raises:
        DeviceLockedError, JournalError, UnknownDeviceError, SocketInUseError, OSError:
            it could not start.

    """
    asyncio.run(_run(settings))


async def _run(settings: Settings) -> None:
    configure_logs()
    log = structlog.get_logger()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with ExitStack() as closing:
        lock = DeviceLock(settings.device)
        closing.callback(lock.release)
        owner = build_owner(settings, closing, log)
        server = ApiServer(owner, settings.socket)
        await server.start()
        log.info("daemon.listening", socket=str(settings.socket), device=settings.device, pid=os.getpid())
        watch = asyncio.create_task(_watch_readiness(owner, server, log))
        await asyncio.sleep(0)  # let it register before the thread starts
        loaded = asyncio.wrap_future(owner.start(settings.checkpoint))
        loaded.add_done_callback(lambda done: _log_load(done, owner, log))
        await stop.wait()
        log.info("daemon.stopping")
        watch.cancel()
        await server.set_ready(False)
        await asyncio.to_thread(owner.stop)
        await server.stop(GRACE_S)
    log.info("daemon.stopped")


def build_owner(settings: Settings, closing: ExitStack, log: structlog.stdlib.BoundLogger) -> Owner:
    settings.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    journal = Journal(settings.state, settings.device)
    closing.callback(journal.close)
    binding = open_binding(settings)
    closing.callback(binding.close)
    if binding.facts.test_options:
        log.warning("daemon.test_options", options=binding.facts.test_options)
    workers = closing.enter_context(ThreadPoolExecutor(WORKERS, "rowlock-worker"))
    hashers = closing.enter_context(ThreadPoolExecutor(settings.threads, "rowlock-hasher"))
    context = Context(SystemClock(), random_id, workers, hashers, log.info)
    stores = Stores.under(settings.state, OsFiles())
    loader = TargetLoader(binding.place, Hasher(hashers), stores.cache())
    planner = Planner(loader, stores, journal, Policy())
    return Owner(context, binding, journal, stores, loader, planner)


async def _watch_readiness(owner: Owner, server: ApiServer, log: structlog.stdlib.BoundLogger) -> None:
    """Follow the owner's state with the health service. A B2 does not flip it."""
    loop, changed, ready = asyncio.get_running_loop(), asyncio.Event(), False

    def wake() -> None:
        loop.call_soon_threadsafe(changed.set)

    owner.observe(wake)
    while True:
        await changed.wait()
        changed.clear()
        view = owner.view
        now = view.resident is not None and view.state in {OwnerState.READY, OwnerState.TRANSITIONING}
        if now != ready:
            ready = now
            await server.set_ready(ready)
            log.info("daemon.readiness", ready=ready, state=view.state.value)


def _log_load(done: asyncio.Future[None], owner: Owner, log: structlog.stdlib.BoundLogger) -> None:
    error = None if done.cancelled() else done.exception()
    resident = owner.view.resident
    if resident is not None:
        log.info("model.resident", generation=resident.generation, identity=resident.model.identity.digest[:12])
    elif isinstance(error, OwnerError):
        log.error("model.absent", reason=error.reason.value, error=str(error), hint=error.hint)
    else:
        log.warning("model.absent", error=str(error) if error else owner.view.reason or "no checkpoint was given")
