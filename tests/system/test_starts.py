"""Starts on what a machine may leave behind: the real daemon refuses with the reason, or recovers and says how."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.commands import Finished, rowlock
from support.daemons import answer, owner, states, transition
from support.disks import mounted_tmpfs
from support.old_journal import make_old

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import owner_pb2

THREADS = ["--threads", "1"]


def refused_start(state: Path, runtime: Path) -> Finished:
    return rowlock("serve", "--state", state, "--socket", runtime / "s", ROWLOCK_RUNTIME_DIR=str(runtime))


def stopped_owner(state: Path, checkpoint: Path, *targets: Path) -> None:
    """A state directory whose owner loaded a checkpoint, moved to others, and stopped."""
    with DaemonProcess(state, ["--checkpoint", str(checkpoint), *THREADS]) as daemon:
        for target in targets:
            assert states(transition(daemon, target=str(target)))[-1] == "PUBLISHED"


@pytest.fixture
def target(tiny: Path, tmp_path: Path) -> Path:
    return change_rows(tiny, tmp_path / "target", EMBED, [5, 200], negate)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, that can be made read-only."""
    with mounted_tmpfs(tmp_path / "disk", "64m", "a read-only disk") as path:
        yield path


def remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)


def test_a_read_only_state_directory_is_refused_by_name(disk: Path, tiny: Path, tmp_path: Path) -> None:
    stopped_owner(disk / "state", tiny)
    remount(disk, "ro")
    done = refused_start(disk / "state", tmp_path)
    assert done.code == 3
    assert str(disk / "state") in done.err
    assert "read" in done.err.lower()
    remount(disk, "rw")
    with DaemonProcess(disk / "state", THREADS) as daemon:
        assert owner(daemon).generation == 1


def test_a_corrupt_page_of_the_journal_is_refused_before_anything_is_loaded(
    tiny: Path, target: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    stopped_owner(state, tiny, target)
    journal = state / "journal.sqlite"
    with sqlite3.connect(journal) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'events'").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    connection.close()
    good = journal.read_bytes()
    with open(journal, "r+b") as file:
        file.seek((page - 1) * size)
        file.write(os.urandom(size))
    done = refused_start(state, tmp_path)
    assert done.code == 3
    assert "journal.sqlite" in done.err
    assert "backup" in done.err
    for path in state.glob("journal.sqlite*"):
        path.unlink()
    journal.write_bytes(good)
    with DaemonProcess(state, THREADS) as daemon:
        assert owner(daemon).generation == 2


def test_a_journal_of_a_newer_version_is_refused_unchanged(tiny: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    stopped_owner(state, tiny)
    with sqlite3.connect(state / "journal.sqlite") as connection:
        connection.execute(
            "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('rowlock', 'm999_future', 'x')"
        )
    connection.close()
    before = (state / "journal.sqlite").read_bytes()
    done = refused_start(state, tmp_path)
    assert done.code == 3
    assert "newer rowlock (m999_future)" in done.err
    assert (state / "journal.sqlite").read_bytes() == before


@pytest.mark.parametrize("harm", [pytest.param("missing", marks=pytest.mark.campaign), "rewritten"])
def test_a_checkpoint_gone_or_rewritten_is_refused_and_the_other_generation_is_offered(
    tiny: Path, target: Path, tmp_path: Path, harm: str
) -> None:
    state = tmp_path / "state"
    with DaemonProcess(state, ["--checkpoint", str(tiny), *THREADS]) as daemon:
        first = answer(daemon)
        transition(daemon, target=str(target))
        second = owner(daemon).identity
    if harm == "missing":
        target.rename(tmp_path / "away")
    else:
        rewrite_in_place(target)
    with DaemonProcess(state, THREADS, ready=False) as daemon:
        endpoint = daemon.client.endpoint
        told = wait_started(daemon)
        assert told.state == owner_pb2.OWNER_STATE_EMPTY
        assert "generation 2 could not be loaded again" in told.reason
        assert ("does not hold generation 2 any more" if harm == "rewritten" else "target") in told.reason
        assert told.reason.endswith("generation 1 can be loaded: rowlock rollback --to 1")
        assert rowlock("generate", "x", endpoint=endpoint).code == 3
        back = rowlock("rollback", "--to", 1, "--json", endpoint=endpoint)
        assert (back.code, back.json_lines[-1]["record"]["level"]) == (0, "B1")
        assert answer(daemon) == first
        assert rowlock("verify", endpoint=endpoint).code == 0
        if harm == "missing":
            (tmp_path / "away").rename(target)
            assert rowlock("rollback", endpoint=endpoint).code == 0
            assert owner(daemon).identity == second


def rewrite_in_place(directory: Path) -> None:
    """Other weights in the very file: the same inode, the same size."""
    with Checkpoint.open(directory) as checkpoint:
        extent = checkpoint.extents[EMBED]
    with open(extent.path, "r+b") as file:
        file.seek(extent.offset)
        row = file.read(extent.tensor.row_bytes)
        file.seek(extent.offset)
        file.write(negate(row))


def wait_started(daemon: DaemonProcess) -> owner_pb2.Owner:
    for item in daemon.client.stream(daemon.client.owner.WatchOwner, owner_pb2.WatchOwnerRequest()):
        if item.owner.state != owner_pb2.OWNER_STATE_LOADING:
            return item.owner
    raise AssertionError


@pytest.mark.parametrize(
    ("point", "outcome"),
    [pytest.param("commit_staged", "FAILED", marks=pytest.mark.campaign), ("commit_intent", "ROLLED_BACK")],
)
def test_an_upgrade_with_an_open_transition(tiny: Path, target: Path, tmp_path: Path, point: str, outcome: str) -> None:
    """The older version died inside a transition; this one starts on its journal."""
    state, kill = tmp_path / "state", tmp_path / "kill.json"
    with DaemonProcess(state, ["--checkpoint", str(tiny), *THREADS, "--test-kill-file", str(kill)]) as daemon:
        before = answer(daemon)
        kill.write_text(json.dumps({"point": point, "moment": "after"}))
        with contextlib.suppress(ClientError):
            transition(daemon, target=str(target), request_id="open")
        assert daemon.process.wait(30) == -signal.SIGKILL
    make_old(state / "journal.sqlite")
    (state / "owner.key").unlink()
    with DaemonProcess(state, THREADS) as daemon:
        endpoint = daemon.client.endpoint
        assert answer(daemon) == before
        told = rowlock("history", "open", "--json", endpoint=endpoint).json
        assert (told["record"]["state"], told["record"]["reason"]) == (outcome, "INTERRUPTED")
        assert rowlock("history", "--verify", endpoint=endpoint).code == 0
        assert states(transition(daemon, target=str(target)))[-1] == "PUBLISHED"


PARENT = """
import os, subprocess, sys, threading, time

def have_children():
    while not os.path.exists(os.environ["ROWLOCK_RUNTIME_DIR"] + "/cpu.lock"):
        time.sleep(0.01)
    spawned = subprocess.Popen(["sleep", "600"], close_fds=False).pid
    forked = os.fork()
    if not forked:
        time.sleep(600)
    with open(os.environ["CHILDREN"] + ".new", "w") as file:
        file.write(f"{spawned} {forked}")
    os.rename(file.name, os.environ["CHILDREN"])

if "serve" in sys.orig_argv:
    threading.Thread(target=have_children, daemon=True).start()
"""
"""Something in the daemon's process, as a vendor's library might be, that spawns a child and forks another."""


def test_the_lock_is_free_after_a_kill_although_children_live(tiny: Path, tmp_path: Path) -> None:
    """Neither keeps what the killed daemon held, and nobody else has it while that one lives."""
    runtime, listed, site = tmp_path / "run", tmp_path / "children", tmp_path / "site"
    runtime.mkdir()
    site.mkdir()
    (site / "sitecustomize.py").write_text(PARENT)
    environment = {"ROWLOCK_RUNTIME_DIR": str(runtime), "PYTHONPATH": str(site), "CHILDREN": str(listed)}
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(tiny), *THREADS], environment) as daemon:
        while not listed.exists():
            assert daemon.process.poll() is None
        children = [int(pid) for pid in listed.read_text().split()]
        try:
            other = refused_start(tmp_path / "other", runtime)
            assert (other.code, f"owned by process {daemon.process.pid}" in other.err) == (3, True)
            daemon.process.kill()
            daemon.process.wait()
            for pid in children:
                os.kill(pid, 0)  # alive
            with DaemonProcess(tmp_path / "state", THREADS, {"ROWLOCK_RUNTIME_DIR": str(runtime)}) as again:
                assert owner(again).generation == 1
                for pid in children:
                    os.kill(pid, 0)  # and still
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
