"""The real daemon: ready only when it is warm, and what users see of pages and variants."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.checkpoints import EMBED, change_rows, negate
from support.commands import rowlock
from support.daemons import answer, begin, generated, owner, states, wait_for_log
from support.http import HTTP, post, url_of
from support.kill_file import KillOrder, Place

from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import owner_pb2

CONFIG = """
[serving]
cache_bytes = 163840
page_tokens = 32
variants = [{batch = 1, length = 100}, {batch = 4, length = 16}]
warmup = true
"""


@pytest.fixture
def daemon(tmp_path: Path, tiny: Path) -> Iterator[DaemonProcess]:
    config = tmp_path / "rowlock.toml"
    config.write_text(CONFIG)
    options = ["--checkpoint", str(tiny), "--threads", "1", "--config", str(config)]
    with DaemonProcess(tmp_path / "state", options) as process:
        yield process


def test_pages_and_variants_from_the_command_line(daemon: DaemonProcess) -> None:
    described = rowlock("describe", "--json", endpoint=daemon.client.endpoint).json
    (group,) = described["cache"]["groups"]
    assert (described["cache"]["page_tokens"], group["pages"], group["free"]) == (32, 20, 20)
    assert (described["served"]["steps"], described["cache"]["hit_tokens"]) == (0, 0)
    before = described["counters"]
    tokens, _ = answer(daemon)
    prepared = rowlock("prepare", "--length", 100, "--json", endpoint=daemon.client.endpoint).json["counters"]
    assert [prepared[name] for name in ("compiles", "program_loads", "allocations", "workspaces")] == [0] * 4
    after = daemon.client.call(daemon.client.owner.Describe, owner_pb2.DescribeRequest())
    assert after.counters.workspaces == before["workspaces"], "warm from the beginning"
    assert after.served.tokens == len(tokens)
    text = rowlock("describe", endpoint=daemon.client.endpoint).out
    assert "2 layers over all positions: 0 of 20 pages of 32 tokens in use" in text
    wrong = rowlock("prepare", "--batch", 9, "--length", 1, endpoint=daemon.client.endpoint)
    assert (wrong.code, "batch: 9 is not from 1 to 8" in wrong.err) == (2, True)


def test_more_than_the_pages_hold_is_refused_with_numbers(daemon: DaemonProcess) -> None:
    with pytest.raises(ClientError, match="pages of 32 tokens each, the cache has 20"):
        generated(daemon, prompt="x" * 600, max_tokens=100)
    assert answer(daemon)[0]


OF_FIRST_TIMES = ("compiles", "program_loads", "allocations", "workspaces")
WARMING = Place("advance", "before")
"""Before anything answers, only a warmup runs steps."""


@pytest.fixture
def pause(tmp_path: Path) -> KillOrder:
    return KillOrder(tmp_path / "pause.json")


def options(tmp_path: Path, checkpoint: Path | None, pause: KillOrder) -> list[str]:
    config = tmp_path / "rowlock.toml"
    config.write_text(CONFIG)
    given = ["--checkpoint", str(checkpoint)] if checkpoint else []
    return [*HTTP, *given, "--config", str(config), *pause.arguments]


def health(daemon: DaemonProcess) -> str:
    with grpc.insecure_channel(daemon.client.endpoint) as channel:
        told = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""), timeout=30)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(told.status)


def health_becomes(daemon: DaemonProcess, wanted: str) -> None:
    """The health service follows the owner: it is told of a change, and then says it."""
    deadline = time.monotonic() + 60
    while health(daemon) != wanted:
        assert time.monotonic() < deadline, f"health is never {wanted}"


def first_times(daemon: DaemonProcess) -> list[int]:
    counters = rowlock("describe", "--json", endpoint=daemon.client.endpoint).json["counters"]
    return [counters[name] for name in OF_FIRST_TIMES]


def test_ready_is_said_in_all_three_ways_only_after_the_warmup(tmp_path: Path, tiny: Path, pause: KillOrder) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager, ThreadPoolExecutor() as clients:
        manager.bind(str(tmp_path / "n"))
        environment = {"NOTIFY_SOCKET": str(tmp_path / "n")}
        with pause.pause_at(WARMING):
            daemon = DaemonProcess(tmp_path / "state", options(tmp_path, tiny, pause), environment, ready=False)
            entered = daemon.__enter__()
            pause.wait()
            assert httpx.get(f"{url_of(entered)}/ready").status_code == 503
            assert health(entered) == "NOT_SERVING"
            manager.setblocking(False)
            with pytest.raises(BlockingIOError):
                manager.recv(4096)
            early = clients.submit(post, url_of(entered), "/v1/completions", prompt="x", max_tokens=2)
        try:
            manager.settimeout(60)
            assert b"READY=1" in manager.recv(4096)
            assert httpx.get(f"{url_of(entered)}/ready").status_code == 200
            health_becomes(entered, "SERVING")
            assert early.result(60).status_code == 200, "who came early is answered, not refused"
        finally:
            daemon.__exit__(None, None, None)


def test_a_reload_is_warm_when_it_is_ready_again(tmp_path: Path, tiny: Path, pause: KillOrder) -> None:
    target = change_rows(tiny, tmp_path / "target", EMBED, [5], negate)
    with DaemonProcess(tmp_path / "state", options(tmp_path, tiny, pause)) as daemon, ThreadPoolExecutor() as clients:
        url = url_of(daemon)
        with pause.pause_at(WARMING):
            going = begin(daemon, target=str(target), require=owner_pb2.REQUIRE_B1)
            pause.wait()
            assert httpx.get(f"{url}/ready").status_code == 503
            health_becomes(daemon, "NOT_SERVING")
            early = clients.submit(post, url, "/v1/completions", prompt="x", max_tokens=2)
        assert states(going.result(60))[-1] == "PUBLISHED"
        assert httpx.get(f"{url}/ready").status_code == 200
        health_becomes(daemon, "SERVING")
        assert early.result(60).headers["x-rowlock-generation"] == "2"
        ready = first_times(daemon)
        first = post(url, "/v1/completions", prompt="y" * 98, max_tokens=2)
        four = clients.map(lambda text: post(url, "/v1/completions", prompt=text * 16, max_tokens=2), "abcd")
        assert [item.status_code for item in (first, *four)] == [200] * 5
        assert first_times(daemon) == ready


@pytest.mark.parametrize(
    "again", [pytest.param(False, id="a first load", marks=pytest.mark.campaign), pytest.param(True, id="a restart")]
)
def test_a_signal_ends_a_warmup_between_its_steps(tmp_path: Path, tiny: Path, pause: KillOrder, again: bool) -> None:
    state, arguments = tmp_path / "state", options(tmp_path, tiny, pause)
    if again:
        with DaemonProcess(state, arguments) as daemon:
            before = answer(daemon)
    with pause.pause_at(WARMING):
        daemon = DaemonProcess(state, arguments, ready=False)
        entered = daemon.__enter__()
        pause.wait()
        entered.process.send_signal(signal.SIGTERM)
        wait_for_log(entered, "owner.stopping")
        pause.die_at(Place("advance", "before"))  # a further step would be its end
    assert entered.process.wait(60) == 0
    assert "Traceback" not in entered.log.read_text()
    daemon.__exit__(None, None, None)
    pause.file.unlink(missing_ok=True)
    with DaemonProcess(state, arguments) as daemon:
        assert owner(daemon).generation == (1 if again else 2)
        told = rowlock("history", "--json", endpoint=daemon.client.endpoint).json_lines
        assert not again or answer(daemon) == before
        assert again or "UNLOADED" in str(told)
