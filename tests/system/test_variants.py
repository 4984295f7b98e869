"""The real daemon: ready only when it is warm, and what users see of pages and variants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import rowlock
from support.daemons import answer, generated

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
