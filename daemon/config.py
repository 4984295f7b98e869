"""The configuration file: TOML, checked in full before anything starts.

Every key has one row in :data:`SCHEMA`; what is not there is an error that names the line
and the nearest key there is.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rowlock.bindings.device import Variant
from rowlock.bindings.model.cache.geometry import CacheLimits
from rowlock.bindings.plan import TargetCheck, Verify
from rowlock.bindings.planner import Policy
from rowlock.daemon.device_kinds import DEVICE_KINDS
from rowlock.daemon.lock import runtime_directory
from rowlock.daemon.owner.drift import DriftPolicy, Upkeep
from rowlock.daemon.owner.options import Drain, Options
from rowlock.daemon.owner.retention import Retention
from rowlock.daemon.owner.scheduler import ACTIVE_MAX
from rowlock.daemon.owner.warmup import batch_problem
from rowlock.daemon.prefill.protocol.frames import TOKENS_MAX, Mode
from rowlock.daemon.prefill.protocol.hello import LAYERS_MAX
from rowlock.daemon.prefill.settings import PrefillSettings, SourceSettings
from rowlock.daemon.settings import HttpSettings, Settings, TlsSettings


class ConfigError(Exception):
    """A configuration that cannot be used: file, line, key and what would do."""


@dataclass(frozen=True)
class Key:
    """One key of the file.

    Attributes:
        parse: makes the value; raises ValueError with what is wanted.
        text: for the documentation.

    """

    parse: Callable[[Any], Any]
    text: str


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def _path(value: Any) -> Path:
    path = Path(_text(value)).expanduser()
    if not path.is_absolute():
        raise ValueError("an absolute path")
    return path


def _paths(value: Any) -> tuple[Path, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of absolute paths")
    return tuple(_path(item) for item in value)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("a list of texts")
    return tuple(_text(item) for item in value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError("a whole number from 0 up")
    return value


def _count(value: Any) -> int:
    if _size(value) == 0:
        raise ValueError("a whole number from 1 up")
    return int(value)


def _count_to(most: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if _size(value) == 0 or value > most:
            raise ValueError(f"a whole number from 1 to {most}")
        return int(value)

    return parse


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ValueError("a number of seconds above 0")
    return float(value)


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError("a share from 0 up, below 1")
    return float(value)


def _address(value: Any) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 address stands in brackets."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]]+)):(\d{1,5})", value if isinstance(value, str) else "")
    if found is None or int(found[3]) > 65535:
        raise ValueError('host:port, such as "127.0.0.1:8000" or "[::1]:8000"')
    return found[1] or found[2], int(found[3])


def _variants(value: Any) -> tuple[Variant, ...]:
    wanted = f"a list of {{batch = 1 to {ACTIVE_MAX}, length = tokens}}"
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(wanted)
    for item in value:
        if set(item) != {"batch", "length"} or not 1 <= _count(item["batch"]) <= ACTIVE_MAX:
            raise ValueError(wanted)
        _count(item["length"])
    return tuple(Variant(**item) for item in value)


def _texts(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("a table of texts")
    return {name: _text(item) for name, item in value.items()}


def _widths(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("a list of numbers of tokens, ascending")
    widths = tuple(_count(item) for item in value)
    if list(widths) != sorted(set(widths)) or widths[-1] > TOKENS_MAX:
        raise ValueError(f"ascending numbers of tokens, at most {TOKENS_MAX}")
    return widths


def _mode(value: Any) -> int:
    if not isinstance(value, str) or not re.fullmatch(r"0?[0-7]{3}", value):
        raise ValueError('an octal file mode such as "0600"')
    return int(value, 8)


def _choice(*choices: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError("one of " + ", ".join(repr(choice) for choice in choices))
        return str(value)

    return parse


SCHEMA: Final[dict[str, dict[str, Key]]] = {
    "owner": {
        "device": Key(_text, "the device to own, such as `cpu`"),
        "state": Key(_path, "state directory: journal, undo, manifests"),
        "programs": Key(_path, "directory in which compiled programs are kept; owners may share it"),
        "checkpoint": Key(_path, "loaded on a first start; later starts load what was published last"),
        "on_start": Key(_choice("reload", "empty"), "`reload` the last published identity, or come up `empty`"),
        "without_hardware": Key(_flag, "`true`: where there is no card, the vendor's software in its place will do"),
        "threads": Key(_count, "threads of one device operation, and of hashing"),
        "call_timeout_s": Key(_seconds, "a device call that takes longer quarantines the owner"),
    },
    "api": {
        "socket": Key(_path, "unix socket of the gRPC API"),
        "socket_mode": Key(_mode, "its file mode, who may do everything"),
        "push_bytes_max": Key(_size, "bytes of rows that one push may carry"),
        "stall_s": Key(_seconds, "a reader of an answer, by gRPC or HTTP, that takes nothing for so long is given up"),
    },
    "http": {
        "listen": Key(
            _address,
            "`host:port` of the OpenAI-compatible API; without it there is none. An address beyond this machine's "
            "loopback needs a certificate or API keys. Port 0 takes a free one, which the log names",
        ),
        "certificate": Key(_path, "PEM file of the server, chain included; goes with `key`, and makes it TLS"),
        "key": Key(_path, "PEM file of its key"),
        "api_keys": Key(_path, "file of bearer keys, one a line: callers of `/v1` and `/metrics` must show one"),
        "model": Key(_text, "what clients call the resident model, whichever that is"),
        "deadline_s": Key(_seconds, "an answer that is not complete after so long is given up"),
    },
    "tls": {
        "address": Key(_text, "`host:port` to serve on with mTLS; all keys of this section go together"),
        "certificate": Key(_path, "PEM file of the server, chain included"),
        "key": Key(_path, "PEM file of its key"),
        "client_ca": Key(_path, "PEM file of the authority that signs client certificates"),
        "readers": Key(_names, "common names that may read and generate"),
        "operators": Key(_names, "common names that may also change the owner"),
    },
    "transition": {
        "target_roots": Key(_paths, "targets must really lie below one of these"),
        "verify": Key(_choice("parents", "groups", "all"), "what is read back before a publish"),
        "target_check": Key(_choice("whole", "staged"), "what of a target is digested before the drain"),
        "drain": Key(_choice("wait", "deadline", "cancel"), "how running requests give way"),
        "drain_deadline_s": Key(_seconds, "with `drain = \"deadline\"`"),
        "on_b1_failure": Key(_choice("reload", "empty"), "after a failed B1: load the old identity again, or not"),
        "undo_durable_max": Key(_size, "bytes up to which an undo is a durable file"),
        "image_bytes_max": Key(_size, "bytes of touched allocations up to which they are compared by image"),
    },
    "drift": {
        "policy": Key(
            _choice("report", "repair", "quarantine"),
            "what follows when resident bytes are found not to be those of the published identity: repair if not set",
        ),
        "scrub_share": Key(_share, "share of time, below 1, in which an idle owner reads its model back; 0: never"),
    },
    "serving": {
        "cache_bytes": Key(
            _count, "bytes of all K/V pages; unset: for 8 sequences of the whole context, at most a quarter of memory"
        ),
        "page_tokens": Key(_count, "positions of one page; more than the context: one page as long as the context"),
        "variants": Key(_variants, "shapes to be ready for: `[{batch = 1, length = 512}, ...]`, requests and tokens"),
        "warmup": Key(_flag, "`true`: run each variant before a model is published; nothing of it is kept or counted"),
        "slots": Key(_count, "requests that run at the same time"),
    },
    "prefill": {
        "source": Key(_choice("none", "subprocess"), "who computes prompts: the owner, or a process that it starts"),
        "python": Key(_path, "the source's interpreter: that of the environment which its device needs"),
        "factory": Key(_text, "`module:function` in that environment that makes the source's engine"),
        "device": Key(_text, "the source's device, as the factory understands it"),
        "threads": Key(_count, "host threads of the source"),
        "widths": Key(_widths, "prompt lengths that programs are prepared for; wider prompts are refused"),
        "options": Key(_texts, "a table of further options for the factory"),
        "memory_max": Key(_count, "bytes of K/V and logits of one prompt, at most"),
        "start_s": Key(_seconds, "in which the source has to announce itself"),
        "silence_s": Key(_seconds, "a source that has a prompt and says nothing for so long is given up"),
        "stream_layers": Key(_count_to(LAYERS_MAX), "announce K/V every so many layers; unset: all of it at the end"),
        "stream_tokens": Key(_count_to(TOKENS_MAX), "with `stream_layers`: and every so many tokens"),
        "stream_from": Key(_count, "with `stream_layers`: shorter prompts are transferred whole all the same"),
        "deferred": Key(_flag, "benchmarks: spans as with `stream_layers`, but announced at the end"),
        "pace_ms": Key(_seconds, "benchmarks: a layer takes so many milliseconds, from memory; answers mean nothing"),
        "prefetch": Key(_flag, "compute and import prompts of requests that wait for others to end"),
        "fallback": Key(_flag, "`true`: prompts that no source can compute are computed here; else they fail"),
        "on_transition": Key(
            _choice("required", "drop"), "a target that no source computes: refuse the transition, or go on without"
        ),
    },
    "retention": {
        "undo_generations": Key(_count, "generations whose undo is kept, newest first; the current one's always is"),
        "undo_bytes": Key(_size, "bytes of all undo files together, the current generation's apart"),
    },
}  # fmt: skip


def default_state(device: str) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(base) / "rowlock" / device.replace(":", "-")


def default_programs() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "rowlock" / "programs"


def default_socket(device: str) -> Path:
    return runtime_directory() / f"{device.replace(':', '-')}.sock"


def read_config(path: Path) -> dict[str, dict[str, Any]]:
    """The parsed values of a file, by section and key.

    Raises:
        ConfigError: naming file, line and key.

    """
    try:
        text = path.read_text(encoding="utf-8")
        sections = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    lines = text.splitlines()
    result: dict[str, dict[str, Any]] = {}
    for section, values in sections.items():
        if section not in SCHEMA or not isinstance(values, dict):
            raise ConfigError(f"{path}:{_line(lines, section)}: unknown section {section!r}{_nearest(section, SCHEMA)}")
        result[section] = {key: _parse(path, lines, section, key, value) for key, value in values.items()}
    problem = _http_problem(result.get("http", {}))
    if problem is not None:
        key, text = problem
        raise ConfigError(f"{path}:{_line(lines, 'http', key)}: http.{key} {text}")
    return result


def _parse(path: Path, lines: list[str], section: str, key: str, value: Any) -> Any:
    where = f"{path}:{_line(lines, section, key)}"
    known = SCHEMA[section].get(key)
    if known is None:
        raise ConfigError(f"{where}: unknown key {key!r} in [{section}]{_nearest(key, SCHEMA[section])}")
    try:
        return known.parse(value)
    except ValueError as error:
        raise ConfigError(f"{where}: {section}.{key} is {value!r}; wanted: {error}") from None


def _line(lines: list[str], section: str, key: str = "") -> int:
    """The line of a section, or of a key in it; 1 if it is written in a way not looked for."""
    current = ""
    for number, line in enumerate(lines, start=1):
        header = re.match(r"\s*\[\s*\"?([\w-]+)\"?\s*\]", line)
        if header:
            current = header[1]
        if current == section and (header if not key else re.match(rf"\s*\"?{re.escape(key)}\"?\s*=", line)):
            return number
        if not header and not current and re.match(rf"\s*\"?{re.escape(section)}\"?\s*[.=]", line):
            return number
    return 1


def _nearest(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(known))}"


def build_settings(values: Mapping[str, Mapping[str, Any]], overrides: Mapping[str, Any]) -> Settings:
    """Settings from a file's values, with those of the command line in their place.

    Args:
        values: from :func:`read_config`.
        overrides: of ``device, state, socket, checkpoint, threads, http, fault_file, kill_file, placement_file,
            without_hardware, prefill, prefill_stream_layers``; None is unset.

    Raises:
        ConfigError: keys that do not go together.

    """
    given = {key: value for key, value in overrides.items() if value is not None}
    owner, api = dict(values.get("owner", {})), values.get("api", {})
    device = given.get("device", owner.get("device", "cpu"))
    transition = values.get("transition", {})
    return Settings(
        device=device,
        prefill=_prefill(values.get("prefill", {}), given),
        state=given.get("state", owner.get("state", default_state(device))),
        socket=given.get("socket", api.get("socket", default_socket(device))),
        socket_mode=api.get("socket_mode", 0o600),
        checkpoint=given.get("checkpoint", owner.get("checkpoint")),
        reload=owner.get("on_start", "reload") == "reload",
        threads=given.get("threads", owner.get("threads", os.cpu_count() or 1)),
        target_roots=transition.get("target_roots", ()),
        call_timeout_s=owner.get("call_timeout_s", Settings.call_timeout_s),
        push_bytes_max=api.get("push_bytes_max", Settings.push_bytes_max),
        options=_options(transition),
        policy=Policy(
            undo_durable_max=transition.get("undo_durable_max", Policy.undo_durable_max),
            image_bytes_max=transition.get("image_bytes_max", Policy.image_bytes_max),
        ),
        upkeep=_upkeep(values.get("drift", {})),
        retention=Retention(**values.get("retention", {})),
        stall_s=api.get("stall_s", Settings.stall_s),
        **_serving(device, values.get("serving", {})),
        tls=_tls(values.get("tls")),
        http=_http(values.get("http", {}), given.get("http")),
        fault_file=given.get("fault_file"),
        kill_file=given.get("kill_file"),
        placement_file=given.get("placement_file"),
        programs=owner.get("programs", default_programs()),
        without_hardware=given.get("without_hardware", owner.get("without_hardware", False)),
    )


def _serving(device: str, serving: Mapping[str, Any]) -> dict[str, Any]:
    limits = {key: serving[key] for key in ("cache_bytes", "page_tokens") if key in serving}
    variants, warmup = serving.get("variants", ()), serving.get("warmup", False)
    kind = DEVICE_KINDS.get(device.partition(":")[0])
    for variant in variants:
        problem = batch_problem(device, kind.batch_max if kind else 0, variant)
        if problem:
            raise ConfigError(problem)
    if warmup and not variants:
        raise ConfigError("serving.warmup has nothing to run: name serving.variants")
    slots = serving.get("slots", Settings.slots)
    return {"cache": CacheLimits(**limits), "variants": variants, "warmup": warmup, "slots": slots}


def _options(transition: Mapping[str, Any]) -> Options:
    drain = Drain(transition.get("drain", "wait").upper())
    if (drain is Drain.DEADLINE) != ("drain_deadline_s" in transition):
        raise ConfigError('transition.drain_deadline_s goes with drain = "deadline", and with nothing else')
    return Options(
        verify=Verify(transition.get("verify", "parents").upper()),
        target_check=TargetCheck(transition.get("target_check", "whole").upper()),
        drain=drain,
        drain_deadline_s=transition.get("drain_deadline_s", 0.0),
        reload_old=transition.get("on_b1_failure", "reload") == "reload",
    )


def _upkeep(drift: Mapping[str, Any]) -> Upkeep:
    return Upkeep(DriftPolicy(drift.get("policy", "repair").upper()), drift.get("scrub_share", 0.0))


def _prefill(values: Mapping[str, Any], given: Mapping[str, Any]) -> PrefillSettings | None:
    values = dict(values)
    if given.get("prefill", values.pop("source", "none")) == "none":
        if "prefill_stream_layers" in given:
            raise ConfigError("--prefill-stream-layers goes with --prefill subprocess")
        return None
    layers = given.get("prefill_stream_layers", values.pop("stream_layers", 0))
    for key in ("stream_tokens", "stream_from"):
        if key in values and not layers:
            raise ConfigError(f"prefill.{key} goes with prefill.stream_layers")
    mode = Mode.STREAM if layers else Mode.WHOLE
    if values.pop("deferred", False):
        mode = Mode.DEFERRED
    source = {key: values.pop(key) for key in _SOURCE_KEYS if key in values}
    if "python" in source:
        source["python"] = str(source["python"])
    return PrefillSettings(
        source=SourceSettings(**source, extra=values.pop("options", {})),
        mode=mode,
        layers_per_span=layers or 1,
        chunk=values.pop("stream_tokens", 0),
        required=values.pop("on_transition", "required") == "required",
        **values,
    )


_SOURCE_KEYS: Final = (
    "python",
    "factory",
    "device",
    "threads",
    "widths",
    "memory_max",
    "start_s",
    "silence_s",
    "pace_ms",
)


def _tls(values: Mapping[str, Any] | None) -> TlsSettings | None:
    if values is None:
        return None
    missing = [key for key in ("address", "certificate", "key", "client_ca") if key not in values]
    if missing:
        raise ConfigError(f"tls.{missing[0]} is missing: TCP is served with mTLS only, which needs all of its keys")
    return TlsSettings(**values)


def _http(values: Mapping[str, Any], listen: str | None) -> HttpSettings | None:
    """The HTTP API, if it is to be served; ``listen`` is the command line's.

    Raises:
        ConfigError: an address that cannot be, or one for others that is not protected.

    """
    chosen = dict(values)
    if listen is not None:
        try:
            chosen["listen"] = _address(listen)
        except ValueError as error:
            raise ConfigError(f"--http is {listen!r}; wanted: {error}") from None
    problem = _http_problem(chosen)
    if problem is not None:
        raise ConfigError(f"--http: http.{problem[0]} {problem[1]}")
    if "listen" not in chosen:
        return None
    host, port = chosen.pop("listen")
    return HttpSettings(host, port, **chosen)


def _http_problem(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """A key of [http] that does not go with the others, and why."""
    for key, other in (("certificate", "key"), ("key", "certificate")):
        if key in values and other not in values:
            return key, f"goes with http.{other}, which is missing"
    host, _port = values.get("listen", ("localhost", 0))
    if not _is_loopback(host) and not values.keys() & {"certificate", "api_keys"}:
        return "listen", (
            f"is {host}, which others can reach: give http.certificate and http.key, or http.api_keys, "
            "or listen on 127.0.0.1"
        )
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
