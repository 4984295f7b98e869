"""The configuration file: every mistake is named with its line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import rowlock

from rowlock.bindings.device import Variant
from rowlock.bindings.model.cache.geometry import CacheLimits
from rowlock.bindings.plan import TargetCheck, Verify
from rowlock.daemon.config import ConfigError, build_settings, read_config
from rowlock.daemon.owner.options import Drain
from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.daemon.prefill.settings import PrefillSettings, SourceSettings
from rowlock.daemon.settings import HttpSettings

GOOD = """
[owner]
device = "cpu"
state = "/var/lib/rowlock/cpu"
on_start = "empty"
threads = 3
call_timeout_s = 30

[api]
socket = "/run/rowlock/x.sock"
socket_mode = "0660"

[transition]
target_roots = ["/models"]
verify = "all"
target_check = "staged"
drain = "deadline"
drain_deadline_s = 2.5
on_b1_failure = "empty"
undo_durable_max = 0

[serving]
page_tokens = 16
variants = [{batch = 2, length = 64}]
warmup = true
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rowlock.toml"
    path.write_text(text)
    return path


def test_a_good_file_becomes_settings_and_the_command_line_comes_first(tmp_path: Path) -> None:
    settings = build_settings(read_config(write(tmp_path, GOOD)), {"threads": 5, "device": None})
    assert (settings.device, settings.threads, settings.socket_mode) == ("cpu", 5, 0o660)
    assert (settings.state, settings.socket) == (Path("/var/lib/rowlock/cpu"), Path("/run/rowlock/x.sock"))
    assert (settings.reload, settings.call_timeout_s, settings.target_roots) == (False, 30.0, (Path("/models"),))
    options = settings.options
    assert (options.verify, options.target_check, options.drain) == (Verify.ALL, TargetCheck.STAGED, Drain.DEADLINE)
    assert (settings.cache, settings.variants, settings.warmup) == (CacheLimits(0, 16), (Variant(2, 64),), True)
    assert (options.drain_deadline_s, options.reload_old, settings.policy.undo_durable_max) == (2.5, False, 0)


def test_defaults_are_the_documented_ones() -> None:
    settings = build_settings({}, {})
    assert (settings.device, settings.reload, settings.tls, settings.socket_mode) == ("cpu", True, None, 0o600)
    assert (settings.options.verify, settings.options.drain) == (Verify.PARENTS, Drain.WAIT)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[owner]\n\ndevise = "cpu"\n', r"toml:3: unknown key 'devise' in \[owner\]; did you mean 'device'\?"),
        ("[ownr]\nx = 1\n", r"toml:1: unknown section 'ownr'; did you mean 'owner'\?"),
        ('device = "cpu"\n', r"toml:1: unknown section 'device'"),
        ("[owner]\nthreads = 0\n", r"toml:2: owner.threads is 0; wanted: a whole number from 1 up"),
        ("[owner]\nthreads = true\n", "wanted: a whole number"),
        ('[owner]\nstate = "relative"\n', "an absolute path"),
        ('[api]\nsocket_mode = "999"\n', "octal"),
        ("[owner]\ncall_timeout_s = -1\n", "seconds above 0"),
        ('[transition]\nverify = "some"\n', "one of 'parents', 'groups', 'all'"),
        ('[transition]\ntarget_roots = "/models"\n', "a list of absolute paths"),
        ('[http]\nlisten = "0.0.0.0:80"\n', "toml:2: http.listen is 0.0.0.0, which others can reach"),
        ('[http]\n\nlisten = "example.org:80"\n', "toml:3: http.listen is example.org, which others can reach"),
        ('[http]\nlisten = "8000"\n', "toml:2: http.listen is '8000'; wanted: host:port"),
        ('[http]\nlisten = "127.0.0.1:99999"\n', "toml:2: http.listen is"),
        ('[http]\ncertificate = "/c.pem"\n', "toml:2: http.certificate goes with http.key"),
        ('[http]\nkey = "/c.key"\n', "toml:2: http.key goes with http.certificate"),
        ("[serving]\ncache_bytes = 0\n", "a whole number from 1 up"),
        ("[serving]\nvariants = [{batch = 9, length = 1}]\n", "batch = 1 to 8, length = tokens"),
        ("[serving]\nvariants = [{batch = 1}]\n", "batch = 1 to 8, length = tokens"),
        ("[serving]\nvariants = [{batch = 1, length = 0}]\n", "a whole number from 1 up"),
        ("[serving]\nvariants = [512]\n", "batch = 1 to 8, length = tokens"),
        ("[owner]\nthreads = \n", "toml"),
        ("[owner]\nthreads = 1\nthreads = 2\n", "toml"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_config(write(tmp_path, text))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"transition": {"drain": "deadline"}}, "drain_deadline_s"),
        ({"transition": {"drain_deadline_s": 1.0}}, "drain_deadline_s"),
        ({"serving": {"warmup": True}}, "serving.warmup has nothing to run"),
        ({"tls": {"address": "x:1", "certificate": Path("/c"), "key": Path("/k")}}, "tls.client_ca"),
    ],
)
def test_keys_that_do_not_go_together(values: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build_settings(values, {})


@pytest.mark.parametrize("address", ["0.0.0.0:8000", "[::]:8000", "192.0.2.1:1", "example.org:1"])
def test_an_address_that_others_can_reach_needs_protection(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--http: http\.listen is .*, which others can reach"):
        build_settings({}, {"http": address})
    for protection in ({"api_keys": tmp_path}, {"certificate": tmp_path, "key": tmp_path}):
        assert build_settings({"http": protection}, {"http": address}).http is not None


def test_http_is_served_where_it_is_told_to(tmp_path: Path) -> None:
    assert build_settings({}, {}).http is None
    assert build_settings({"http": {"model": "m"}}, {}).http is None
    values = read_config(write(tmp_path, '[http]\nlisten = "127.0.0.1:8000"\ndeadline_s = 5\n'))
    assert build_settings(values, {}).http == HttpSettings("127.0.0.1", 8000, deadline_s=5.0)
    assert build_settings(values, {"http": "[::1]:1"}).http == HttpSettings("::1", 1, deadline_s=5.0)
    assert build_settings({}, {"http": "localhost:0"}).http == HttpSettings("localhost", 0)
    with pytest.raises(ConfigError, match="--http is 'x'; wanted: host:port"):
        build_settings({}, {"http": "x"})


def test_check_config_from_the_command_line(tmp_path: Path) -> None:
    good = rowlock("serve", "--config", write(tmp_path, GOOD), "--check-config")
    assert (good.code, "good" in good.out) == (0, True)
    bad = rowlock("serve", "--config", write(tmp_path, '[owner]\ndevise = "cpu"\n'), "--check-config")
    assert bad.code == 2
    assert "did you mean 'device'" in bad.err
    unknown = rowlock("serve", "--device", "tpu:0", "--state", tmp_path / "s", ROWLOCK_RUNTIME_DIR=str(tmp_path))
    assert unknown.code == 3
    assert "no binding for device 'tpu:0'" in unknown.err


def test_doctor_says_what_is_there(tmp_path: Path) -> None:
    found = rowlock("doctor", "--state", tmp_path / "state", "--json", ROWLOCK_RUNTIME_DIR=str(tmp_path))
    assert found.code == 0
    assert {item["name"] for item in found.json["findings"]} >= {
        "python",
        "torch",
        "device",
        "lock",
        "state",
        "journal",
    }
    assert not (tmp_path / "state").exists()
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "journal.sqlite").write_bytes(b"not a database" * 100)
    bad = rowlock("doctor", "--state", tmp_path / "state", ROWLOCK_RUNTIME_DIR=str(tmp_path))
    assert bad.code == 3
    assert "BAD  journal" in bad.out


PREFILL = """
[prefill]
source = "subprocess"
python = "/opt/npu/bin/python"
factory = "my_npu.source:create"
device = "npu:0,npu:1"
threads = 3
widths = [64, 4096]
options = {partitions = "2"}
memory_max = 1000000
start_s = 5
silence_s = 7.5
stream_layers = 4
stream_tokens = 256
stream_from = 100
prefetch = false
fallback = true
on_transition = "drop"
"""


def test_every_key_of_a_source_becomes_a_setting(tmp_path: Path) -> None:
    source = SourceSettings(
        "my_npu.source:create", "/opt/npu/bin/python", "npu:0,npu:1", 3, (64, 4096), {"partitions": "2"}, 1_000_000,
        5.0, 7.5,
    )  # fmt: skip
    expected = PrefillSettings(source, Mode.STREAM, 4, 256, 100, prefetch=False, fallback=True, required=False)
    read = read_config(write(tmp_path, PREFILL))
    assert build_settings(read, {}).prefill == expected
    more = build_settings(read, {"prefill_stream_layers": 2}).prefill
    assert more == replace(expected, layers_per_span=2)
    assert build_settings(read, {"prefill": "none"}).prefill is None
    assert build_settings(read_config(write(tmp_path, PREFILL + "deferred = true\n")), {}).prefill == replace(
        expected, mode=Mode.DEFERRED
    )


def test_whole_results_are_the_default() -> None:
    assert build_settings({}, {}).prefill is None
    assert build_settings({}, {"prefill": "subprocess"}).prefill == PrefillSettings()
    assert (PrefillSettings().mode, PrefillSettings().fallback, PrefillSettings().prefetch) == (Mode.WHOLE, False, True)
    streamed = build_settings({}, {"prefill": "subprocess", "prefill_stream_layers": 3}).prefill
    assert streamed == PrefillSettings(mode=Mode.STREAM, layers_per_span=3)


@pytest.mark.parametrize(
    ("text", "given", "word"),
    [
        ("", {"prefill_stream_layers": 1}, "--prefill-stream-layers goes with --prefill subprocess"),
        ('[prefill]\nsource = "subprocess"\nstream_tokens = 5', {}, "prefill.stream_tokens goes with"),
        ('[prefill]\nsource = "subprocess"\nstream_from = 5', {}, "prefill.stream_from goes with"),
        ("[prefill]\nstream_layers = 4294967296", {}, "a whole number from 1 to 1024"),
        ("[prefill]\nstream_tokens = 4294967296", {}, "a whole number from 1 to 31744"),
        ("[prefill]\nwidths = [4, 2]", {}, "ascending"),
    ],
)
def test_a_source_that_cannot_be_is_refused(tmp_path: Path, text: str, given: dict[str, int], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        build_settings(read_config(write(tmp_path, text)), given)
