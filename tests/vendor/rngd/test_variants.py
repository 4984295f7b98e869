"""Which programs there are: by configuration, ahead of an owner, and added to one that runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows
from support.commands import rowlock
from support.daemons import owner, transition
from support.devices import RNGD, device_of_owners
from support.owners import OwnerHarness, running_owner
from support.reference import cpu_tokens
from support.rngd import digests, negate_f32

from rowlock.bindings.device import DeviceError, Variant
from rowlock.bindings.rngd.builder import Builder
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.daemon.owner.core import CancelledError
from rowlock.v1 import inference_pb2, owner_pb2
from rowlock.v1.errors import OwnerError, Reason

LENGTHS = (16, 100)
CONFIG = f"""
[serving]
variants = [{", ".join(f"{{batch = 1, length = {length}}}" for length in LENGTHS)}]
warmup = true
"""
OF_FIRST_TIMES = ("compiles", "program_loads", "allocations", "uploads")
TOKENS = 6


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "rowlock.toml"
    file.write_text(CONFIG)
    return file


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, base: Path, config: Path) -> Iterator[DaemonProcess]:
    options = ["--checkpoint", str(base), "--device", RNGD["device"], "--without-hardware", "--config", str(config)]
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), options, device_of_owners().environment()) as process:
        yield process


def describe(daemon: DaemonProcess) -> owner_pb2.DescribeResponse:
    return daemon.client.call(daemon.client.owner.Describe, owner_pb2.DescribeRequest())


def first_times(daemon: DaemonProcess) -> list[int]:
    counters = describe(daemon).counters
    return [getattr(counters, name) for name in OF_FIRST_TIMES]


def generate(daemon: DaemonProcess, prompt: tuple[int, ...]) -> list[int]:
    request = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenIds(ids=prompt), max_tokens=TOKENS, ignore_eos=True
    )
    return [
        token for message in daemon.client.stream(daemon.client.inference.Generate, request) for token in message.tokens
    ]


def executions_of(daemon: DaemonProcess, base: Path, length: int) -> int:
    """Runs of the evaluator for one prompt, whose tokens are the CPU binding's."""
    prompt, before = tuple((7 * at + length) % 250 for at in range(length)), describe(daemon).counters.executions
    assert generate(daemon, prompt) == cpu_tokens(base, prompt, TOKENS)
    return describe(daemon).counters.executions - before


def test_the_configuration_decides_the_programs_and_nothing_is_made_at_a_first_request(
    daemon: DaemonProcess, base: Path
) -> None:
    assert set(describe(daemon).programs) == {"decoder-1x256", *(f"decoder-{length}x256" for length in LENGTHS)}
    ready = first_times(daemon)
    for length in LENGTHS:
        assert executions_of(daemon, base, length) == TOKENS, "the whole prompt goes through one program at once"
    for length in (5, 130):  # padded, and in two pieces
        assert executions_of(daemon, base, length) == TOKENS + length // max(LENGTHS)
    assert first_times(daemon) == ready


def test_a_variant_is_added_to_a_live_owner(daemon: DaemonProcess, base: Path, tmp_path: Path) -> None:
    before, identity = describe(daemon), owner(daemon).identity
    assert executions_of(daemon, base, 120) == TOKENS + 1
    added = rowlock("prepare", "--length", 120, "--json", endpoint=daemon.client.endpoint, timeout_s=900).json[
        "counters"
    ]
    assert (added["program_loads"], added["allocations"], added["uploads"], added["bytes_written"]) == (1, 0, 0, 0)
    after, ready = describe(daemon), first_times(daemon)
    assert set(after.programs) - set(before.programs) == {"decoder-120x256"}
    assert before.programs.items() <= after.programs.items()
    assert list(after.parents) == list(before.parents), "weights lie where they lay"
    assert owner(daemon).identity == identity
    assert executions_of(daemon, base, 120) == TOKENS
    assert first_times(daemon) == ready
    again = rowlock("prepare", "--length", 120, "--json", endpoint=daemon.client.endpoint, timeout_s=900).json[
        "counters"
    ]
    assert (again["compiles"], again["program_loads"]) == (0, 0)
    target = change_rows(base, tmp_path / "target", EMBED, [104, 101], negate_f32)
    record = transition(daemon, target=str(target), require=owner_pb2.REQUIRE_B2)[-1].record
    assert record.state == owner_pb2.TRANSITION_STATE_PUBLISHED
    assert (first_times(daemon), describe(daemon).programs) == (ready, after.programs)
    assert executions_of(daemon, target, 120) == TOKENS
    assert transition(daemon, target=str(base))[-1].record.level == owner_pb2.LEVEL_B2


def test_programs_built_ahead_are_what_an_owner_loads(base: Path, config: Path, tmp_path: Path) -> None:
    kept = tmp_path / "rowlock" / "programs"
    arguments = ["prepare", "--checkpoint", base, "--device", "rngd:3", "--without-hardware", "--json"]
    ahead = rowlock(*arguments, "--config", config, XDG_CACHE_HOME=str(tmp_path))
    assert ahead.code == 0, ahead.err
    names = {"decoder-1x256", *(f"decoder-{length}x256" for length in LENGTHS)}
    assert (set(ahead.json["programs"]), ahead.json["built"], ahead.json["directory"]) == (names, 3, str(kept))
    files = digests(kept)
    again = rowlock(*arguments, "--config", config, XDG_CACHE_HOME=str(tmp_path)).json
    assert (again["programs"], again["built"], digests(kept)) == (ahead.json["programs"], 0, files)
    settings = {"variants": tuple(Variant(1, length) for length in LENGTHS), "warmup": True}
    with running_owner(tmp_path / "state", base, programs=kept, **settings) as running:
        resident, counters = running.owner.view.resident, running.owner.view.counters
        assert resident is not None
        assert (dict(resident.runtime.programs), counters.compiles) == (ahead.json["programs"], 0)
    assert digests(kept) == files
    other = rowlock(*arguments, "--length", 7, XDG_CACHE_HOME=str(tmp_path)).json
    assert (set(other["programs"]), other["built"]) == ({"decoder-1x256", "decoder-7x256"}, 1)


def test_several_requests_of_one_program_are_refused_by_name(
    daemon: DaemonProcess, owner: OwnerHarness, base: Path, tmp_path: Path
) -> None:
    told = "serving.variants: batch 2, length 16: a program of rngd:1 is for 1 request at a time"
    live = rowlock("prepare", "--batch", 2, "--length", 16, endpoint=daemon.client.endpoint)
    assert (live.code, told in live.err, "batch = 1" in live.err) == (2, True, True)
    with pytest.raises(OwnerError, match=told) as caught:
        owner.owner.prepare_variant(Variant(2, 16)).result(60)
    assert caught.value.reason is Reason.ARGUMENT_INVALID
    file = tmp_path / "two.toml"
    file.write_text("[serving]\nvariants = [{batch = 2, length = 16}]\n")
    for command in (["serve", "--check-config"], ["prepare", "--checkpoint", base]):
        refused = rowlock(*command, "--config", file, "--device", "rngd:1", "--without-hardware")
        assert (refused.code, told in refused.err) == (2, True), refused.err
    with running_owner(tmp_path / "state", base, variants=(Variant(2, 16),)) as empty:
        assert told in empty.owner.view.reason


def test_a_program_that_has_gone_is_an_error_and_is_not_built_while_others_wait(
    owner: OwnerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the building and the loading somebody clears the directory: the resident model goes on as it was."""
    before, source = owner.tokens(), owner.core.binding._inner._programs
    resident = owner.owner.view.resident
    assert resident is not None
    programs = dict(resident.runtime.programs)
    with monkeypatch.context() as patch:
        patch.setattr(source, "build", lambda _wanted, _given_up: None)
        with pytest.raises(DeviceError, match="decoder-33x256 is not in "):
            owner.owner.prepare_variant(Variant(1, 33)).result(60)
    assert (dict(resident.runtime.programs), owner.tokens()) == (programs, before)


def test_an_owner_that_stops_does_not_wait_for_the_compiler(tmp_path: Path, base: Path) -> None:
    begun = tmp_path / "begun"
    code = f"import threading, pathlib; pathlib.Path({str(begun)!r}).touch(); threading.Event().wait()"
    with running_owner(tmp_path / "state", base) as owner:
        source = owner.core.binding._inner._programs
        source._cache._builder = Builder(tmp_path, "reference", [sys.executable, "-c", code])
        adding = owner.owner.prepare_variant(Variant(1, 41))
        until(begun.exists)
    with pytest.raises(CancelledError, match="the daemon is stopping"):
        adding.result(60)


def test_a_compiler_does_not_outlive_who_started_it(tmp_path: Path, base: Path) -> None:
    command = [sys.executable, "-m", "rowlock.cli", "prepare", "--checkpoint", str(base), "--device", "rngd:0"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen([*command, "--without-hardware"], env=environment, stdout=subprocess.PIPE) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        until(lambda: bool(children.read_text()))
        (child,) = children.read_text().split()
        until(lambda: b"build_child" in Path(f"/proc/{child}/cmdline").read_bytes())
        until(lambda: is_bound(child))
        parent.kill()
    until(lambda: not Path(f"/proc/{child}").exists())


def is_bound(child: str) -> bool:
    """Whether it has got as far as to load the vendor's package: it has bound itself to its parent before that."""
    return b"furiosa" in Path(f"/proc/{child}/maps").read_bytes()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)
