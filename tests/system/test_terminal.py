"""`rowlock generate` and `rowlock status --watch` at a terminal, in a pipe, and interrupted."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.commands import rowlock
from support.daemons import generated, owner, transition

from rowlock.cli.daemon_process import DaemonProcess

STILL = ["--threads", "1"]


@pytest.fixture(scope="module")
def daemon(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("cli") / "state", [*STILL, "--checkpoint", str(tiny)]) as process:
        yield process


@contextmanager
def begun(daemon: DaemonProcess, *arguments: str, stdout: int = subprocess.PIPE) -> Iterator[subprocess.Popen[bytes]]:
    """The command line, running; interrupted at the end if it still does."""
    command = [sys.executable, "-m", "rowlock.cli", *arguments, "--endpoint", daemon.client.endpoint]
    with subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE) as running:
        try:
            yield running
        finally:
            running.send_signal(signal.SIGINT)
            running.communicate(timeout=60)


def test_generate_prints_the_text_and_says_on_stderr_who_answered(daemon: DaemonProcess) -> None:
    text, finish, identity = generated(daemon, prompt="hello", max_tokens=9, ignore_eos=True)
    arguments = ["generate", "hello", "--max-tokens", "9", "--ignore-eos"]
    done = rowlock(*arguments, endpoint=daemon.client.endpoint)
    assert (done.code, done.out) == (0, text + "\n")
    assert done.err.startswith(f"[{identity[:12]}, generation 1; 9 tokens, ")
    assert done.err.endswith(f"a second; {finish}]\n")
    lines = rowlock(*arguments, "--json", endpoint=daemon.client.endpoint).json_lines
    assert "".join(line["text"] for line in lines) == text
    stopped = rowlock(*arguments, "--stop", text[3:5], endpoint=daemon.client.endpoint)
    assert stopped.out == text[: text.index(text[3:5])] + "\n"
    other = rowlock(*arguments, "--identity", "0" * 12, "--json", endpoint=daemon.client.endpoint)
    assert (other.code, other.json["error"]["reason"]) == (3, "IDENTITY_DIFFERS")


def test_an_interrupted_generate_gives_its_request_up(daemon: DaemonProcess) -> None:
    with begun(daemon, "generate", "x", "--max-tokens", "2000", "--ignore-eos") as running:
        assert running.stdout is not None
        assert running.stdout.read(1), "text comes while the answer is computed"
        computed = owner(daemon).tokens
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=60)
        assert running.returncode == 130
        assert b"; given up]" in error
    while owner(daemon).requests_active:
        pass
    assert owner(daemon).tokens < computed + 1990


def test_status_watched_in_a_pipe_is_a_line_a_look(daemon: DaemonProcess, tiny: Path, tmp_path: Path) -> None:
    target = change_rows(tiny, tmp_path / "target", EMBED, [5], negate)
    with begun(daemon, "status", "--watch", "--json", "--interval", "30") as watching:
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        assert (first["state"], first["tokens_per_s"]) == ("READY", 0)
        generated(daemon, prompt="x", max_tokens=20, ignore_eos=True)
        transition(daemon, target=str(target))
        line = first
        while line["generation"] == first["generation"]:
            line = json.loads(watching.stdout.readline())  # a change is shown at once: nobody waits for 30 s here
        assert line["tokens"] >= first["tokens"] + 20
        assert line["identity"] != first["identity"]
        assert line["cache"]["groups"][0]["pages"] > 0
    assert watching.returncode == 0
    transition(daemon, target=str(tiny))
    with begun(daemon, "status", "--watch", "--interval", "0.05") as plain:
        assert plain.stdout is not None
        for _ in range(3):
            assert b"cpu READY" in plain.stdout.readline()
    assert plain.returncode == 0


def test_status_watched_at_a_terminal_is_refreshed_in_place(daemon: DaemonProcess) -> None:
    ours, theirs = pty.openpty()
    with begun(daemon, "status", "--watch", "--interval", "0.05", stdout=theirs) as watching:
        seen = b""
        while seen.count(b"\x1b[J") < 2:
            seen += os.read(ours, 4096)
    os.close(ours)
    os.close(theirs)
    assert watching.returncode == 0
    first, second = seen.split(b"\x1b[J")[:2]
    for text in (b"cpu: READY", b"identity", b"requests", b"pages in use", b"tokens", b"a second"):
        assert text in second
    lines, _, up = first.rpartition(b"\x1b[")
    assert up == b"%dA" % lines.count(b"\n"), "it goes back to where it began"
