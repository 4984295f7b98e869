"""The daemon process: wiring, start and stop.

Start: log, signals, lock, a look for the device, journal, binding, probe, socket, health, HTTP; then recovery and load
on the owner thread. READY is said when a model is resident, or it is known that none will
be. Stop: not serving, transition cancelled before its first write or else finished, device
closed. A quarantined device is not closed: the process ends with everything as it is.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import structlog
from prometheus_client import CollectorRegistry

from rowlock.bindings.checkpoint.hashing import Hasher
from rowlock.bindings.device import Binding
from rowlock.daemon.answering.answers import Answers
from rowlock.daemon.answering.meter import Meter
from rowlock.daemon.api.server import ApiServer, clear_stale_socket
from rowlock.daemon.devices import lock_device, open_binding
from rowlock.daemon.environments import DeviceRefusedError
from rowlock.daemon.http.app import Probes
from rowlock.daemon.http.generating import Service
from rowlock.daemon.http.owner_metrics import OwnerMetrics
from rowlock.daemon.http.server import HttpServer
from rowlock.daemon.interpreter import set_aside_long_lived, share_lock_fairly
from rowlock.daemon.kill_file import KillFile
from rowlock.daemon.lock import refuse_foreign_state
from rowlock.daemon.logs import configure_logs
from rowlock.daemon.notify import notify
from rowlock.daemon.owner.context import Context, SystemClock, random_id
from rowlock.daemon.owner.owner import Owner
from rowlock.daemon.owner.planning import Planner
from rowlock.daemon.owner.scheduler import Scheduler
from rowlock.daemon.owner.startup import Startup
from rowlock.daemon.owner.stores import Stores
from rowlock.daemon.owner.target import TargetLoader
from rowlock.daemon.pacing import PacedExecutor
from rowlock.daemon.prefill.prefiller import SourcePrefiller
from rowlock.daemon.probing import refuse_absent
from rowlock.daemon.settings import Settings
from rowlock.daemon.staging.apart import ApartHasher, Stagers
from rowlock.journal.files import Files
from rowlock.journal.journal import Journal
from rowlock.journal.points import UNOBSERVED
from rowlock.v1.errors import OwnerError

WORKERS: Final = 4
PLANNERS: Final = 4
WRITERS: Final = 4
GRACE_S: Final = 2.0

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

Log = Any
"""A structlog logger."""


def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT.

    Raises:
        DeviceLockedError, JournalError, DeviceRefusedError, DeviceError, OSError: it could not start.

    """
    configure_logs()
    share_lock_fairly()
    asyncio.run(_run(settings))
    sys.stderr.flush()
    # everything is closed; a thread that hangs in a file system must not keep the process alive
    os._exit(0)


async def _run(settings: Settings) -> None:
    log, stop = structlog.get_logger(), asyncio.Event()
    _stop_on_signals(asyncio.get_running_loop(), stop)
    with ExitStack() as closing:
        closing.callback(lock_device(settings.device).release)
        refuse_absent(settings.device, settings.without_hardware)
        clear_stale_socket(settings.socket)
        owner = build_owner(settings, closing, log)
        planners = _pool(closing, ThreadPoolExecutor(PLANNERS, "rowlock-planner"))
        registry = CollectorRegistry()
        writers = _pool(closing, ThreadPoolExecutor(WRITERS, "rowlock-writer"))
        answers = Answers(owner, Meter(registry, SystemClock().monotonic), settings.stall_s, writers)
        server = ApiServer(owner, answers, settings, planners, stop.set)
        http = _http_server(owner, answers, registry, settings, log)
        await server.start()
        log.info("daemon.listening", socket=str(settings.socket), device=settings.device, pid=os.getpid())
        if http is not None:
            await http.start()
            log.info("daemon.listening_http", url=http.url)
        loaded = _start_owner(owner, server, settings, log)
        await stop.wait()
        await _stop(owner, server, http, loaded, log)
        if owner.view.quarantined:
            log.error("daemon.exiting_quarantined", reason=owner.view.quarantined)
            os._exit(0)  # nothing is closed or freed: native work may still be live
    log.info("daemon.stopped")


def _http_server(
    owner: Owner, answers: Answers, registry: CollectorRegistry, settings: Settings, log: Log
) -> HttpServer | None:
    """The HTTP API, if it is configured; its address is taken, and nothing answered yet."""
    http, clock = settings.http, SystemClock()
    if http is None:
        return None
    registry.register(OwnerMetrics(owner))
    service = Service(answers, http.model, http.deadline_s, random_id, clock.now, log.error)
    return HttpServer(http, service, Probes(owner, registry, http.model, int(clock.now())), settings.stall_s)


def _start_owner(owner: Owner, server: ApiServer, settings: Settings, log: Log) -> list[asyncio.Task[None]]:
    """Begin recovery and load; readiness follows the owner's state from now on."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(changed.set)

    owner.observe(wake)
    done = owner.start(Startup(settings.checkpoint, settings.reload, settings.options))
    return [
        asyncio.create_task(_watch_readiness(owner, server, changed, log)),
        asyncio.create_task(_report_load(asyncio.wrap_future(done), owner, log)),
    ]


def _stop_on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Have the first SIGTERM or SIGINT set an event; from then on neither means anything.

    They are ignored by the kernel, not by a handler that does nothing: a handler of Python's is itself interrupted by
    the next signal, and many of them would exhaust the stack; and the loop's own handlers end with the loop.
    """

    def on_signal(_number: int, _frame: object) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        loop.call_soon_threadsafe(stop.set)

    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)


async def _stop(
    owner: Owner, server: ApiServer, http: HttpServer | None, tasks: list[asyncio.Task[None]], log: Log
) -> None:
    log.info("daemon.stopping")
    notify(STOPPING="1")
    for task in tasks:
        task.cancel()
    if http is not None:
        http.leave()
    await server.leave()
    await asyncio.to_thread(owner.stop)
    await asyncio.gather(server.stop(GRACE_S), *([http.stop(GRACE_S)] if http is not None else []))


def build_owner(settings: Settings, closing: ExitStack, log: Log) -> Owner:
    """An owner with everything that it needs, not started.

    Args:
        settings: of the daemon.
        closing: closes it again.
        log: takes an event name and fields.

    """
    files = Files(points=KillFile(settings.kill_file) if settings.kill_file else UNOBSERVED)
    files.keep_directory(settings.state)
    refuse_foreign_state(settings.state)
    journal = Journal(settings.state, settings.device, files)
    closing.callback(journal.close)
    binding = open_binding(settings)
    closing.callback(binding.close)
    binding.memory.probe()
    if settings.prefill is not None and not binding.facts.imports:
        raise DeviceRefusedError(
            f"prefill: device {settings.device} cannot import K/V: its programs keep theirs to themselves; "
            "start it with --prefill none"
        )
    log.info("daemon.device", device=binding.facts.device, logical=binding.facts.logical)
    test_options = (f"kill_file={settings.kill_file}",) if settings.kill_file else ()
    if binding.facts.test_options or test_options:
        log.warning("daemon.test_options", options=(*binding.facts.test_options, *test_options))
    clock = SystemClock()
    scheduler = Scheduler(clock.monotonic, settings.slots)
    hashers = PacedExecutor(settings.threads, scheduler)
    stagers = Stagers(hashers, staging_threads(settings.threads, binding), log.warning)
    closing.callback(stagers.close)
    context = Context(
        clock,
        random_id,
        workers=_pool(closing, ThreadPoolExecutor(WORKERS, "rowlock-worker")),
        hashers=_pool(closing, hashers),
        new_staging=stagers.new,
        comparers=_pool(closing, ThreadPoolExecutor(settings.threads, "rowlock-comparer")),
        log=log.info,
        points=files.points,
        variants=settings.variants,
        warmup=settings.warmup,
        test_options=test_options,
    )
    return assemble(settings, context, binding, journal, files, scheduler, ApartHasher(stagers), hashers.give_way)


def assemble(
    settings: Settings, context: Context, binding: Binding, journal: Journal, files: Files, scheduler: Scheduler,
    hasher: Hasher, give_way: Callable[[], None] = lambda: None,
) -> Owner:  # fmt: skip
    """An owner of given parts."""
    stores = Stores.under(settings.state, files, settings.retention)
    stores.clear_unfinished()
    roots = settings.target_roots
    artifacts = binding.facts.binding == "atom"
    loader = TargetLoader(binding.place, hasher, stores.cache(), roots, context.log, artifacts, give_way)
    planner = Planner(loader, stores, journal, settings.policy)
    new_prefiller = partial(SourcePrefiller, settings.prefill, log=context.log) if settings.prefill else None
    return Owner(
        context, binding, journal, stores, loader, planner, scheduler, settings.call_timeout_s, settings.upkeep,
        new_prefiller,
    )  # fmt: skip


def staging_threads(threads: int, binding: Binding) -> int:
    """Of the process that stages beside decoding: as many as there are, or as a device that is the host leaves."""
    return max((os.cpu_count() or 1) - threads, 1) if binding.facts.host_memory else threads


def _pool(closing: ExitStack, executor: ThreadPoolExecutor) -> ThreadPoolExecutor:
    """A pool that is told to end, and not waited for: its threads may hang in a file system."""
    closing.callback(executor.shutdown, wait=False, cancel_futures=True)
    return executor


async def _watch_readiness(owner: Owner, server: ApiServer, changed: asyncio.Event, log: Log) -> None:
    """Follow the owner's state with the health service. A B2 does not flip it."""
    ready = False
    while True:
        await changed.wait()
        changed.clear()
        view = owner.view
        if view.serving != ready:
            ready = view.serving
            await server.set_ready(ready)
            log.info("daemon.readiness", ready=ready, state=view.state.value)


async def _report_load(loaded: asyncio.Future[None], owner: Owner, log: Log) -> None:
    """Say how the start went, to the log and to systemd: an owner without a model is up all the same."""
    try:
        await loaded
    except OwnerError as error:
        log.error("model.absent", reason=error.reason.value, error=str(error), hint=error.hint)
    except Exception as error:  # noqa: BLE001 - reported; the owner's view has it too
        log.error("model.absent", error=repr(error))
    set_aside_long_lived()
    resident = owner.view.resident
    if resident is not None:
        log.info("model.resident", generation=resident.generation, identity=resident.model.identity.digest[:12])
        notify(READY="1", STATUS=f"generation {resident.generation} is resident")
    else:
        reason = owner.view.quarantined or owner.view.reason or "no checkpoint was given"
        log.warning("model.absent", reason=reason, state=owner.view.state.value)
        notify(READY="1", STATUS=f"{owner.view.state.value}: {reason}")
