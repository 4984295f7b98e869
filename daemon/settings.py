"""What a daemon is started with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rowlock.bindings.device import Variant
from rowlock.bindings.model.cache.geometry import CacheLimits
from rowlock.bindings.planner import Policy
from rowlock.daemon.owner.drift import Upkeep
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.retention import Retention
from rowlock.daemon.owner.scheduler import ACTIVE_MAX
from rowlock.daemon.prefill.settings import PrefillSettings


@dataclass(frozen=True)
class TlsSettings:
    """mTLS on a TCP address.

    Attributes:
        address: ``host:port``.
        certificate: PEM file of the server, its chain included.
        key: PEM file.
        client_ca: PEM file of the authority whose certificates clients must show.
        readers: common names of clients that may read and generate.
        operators: common names of clients that may also change the owner.

    """

    address: str
    certificate: Path
    key: Path
    client_ca: Path
    readers: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()


@dataclass(frozen=True)
class HttpSettings:
    """The OpenAI-compatible API.

    Attributes:
        host: name or address to listen on.
        port: 0 takes a free one.
        certificate: PEM file of the server, its chain included; with ``key``, TLS.
        key: PEM file.
        api_keys: file of bearer keys, one a line; callers must show one of them.
        model: what clients call the resident model.
        deadline_s: an answer that is not complete after so long is given up.

    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    api_keys: Path | None = None
    model: str = "rowlock"
    deadline_s: float = 600.0


@dataclass(frozen=True)
class Settings:
    """Configuration of one owner.

    Attributes:
        device: e.g. ``cpu``, ``atom:1``.
        state: directory of the journal and what belongs to it.
        socket: unix socket of the gRPC API.
        socket_mode: its file mode.
        checkpoint: loaded on a first start; later starts load what was published last.
        reload: on a start, load what was published last; else come up EMPTY.
        threads: of one device operation, and of hashing.
        target_roots: if not empty, targets must really lie below one of them.
        call_timeout_s: a device call that takes longer quarantines the owner.
        push_bytes_max: rows that one push may carry.
        stall_s: a reader of an answer that takes nothing for so long is given up.
        options: of transitions, where the caller leaves them open.
        policy: of the planner.
        retention: how much of the past is kept.
        upkeep: how the resident model is looked after.
        tls: serve gRPC on TCP too.
        http: serve HTTP too.
        fault_file: test option of the bindings.
        kill_file: test option: die or wait at a named point.
        placement_file: test option of the RNGD binding.
        cache: of keys and values.
        variants: shapes to be ready for.
        warmup: run each variant before a model is published.
        slots: requests that run at the same time.
        prefill: how prompts are computed elsewhere; None: they are computed here.
        programs: directory of compiled programs; None is ``programs`` in the state directory.
        without_hardware: a vendor's software stand-in for the device will do; `describe` says so.

    """

    device: str
    state: Path
    socket: Path
    checkpoint: Path | None = None
    threads: int = 1
    socket_mode: int = 0o600
    reload: bool = True
    target_roots: tuple[Path, ...] = ()
    call_timeout_s: float = 120.0
    push_bytes_max: int = 1024**3
    stall_s: float = 60.0
    options: Options = field(default_factory=Options)
    policy: Policy = field(default_factory=Policy)
    retention: Retention = field(default_factory=Retention)
    upkeep: Upkeep = field(default_factory=Upkeep)
    tls: TlsSettings | None = None
    http: HttpSettings | None = None
    fault_file: Path | None = None
    kill_file: Path | None = None
    placement_file: Path | None = None
    cache: CacheLimits = field(default_factory=CacheLimits)
    variants: tuple[Variant, ...] = ()
    warmup: bool = False
    slots: int = ACTIVE_MAX
    prefill: PrefillSettings | None = None
    programs: Path | None = None
    without_hardware: bool = False
