"""SIGTERM and SIGINT at every step of starting, of a transition and of stopping: the daemon ends in good order.

It ends with 0, whatever it was doing; before the first device write a transition ends in CANCELLED, after it
it is brought to its end; the next daemon finds nothing in its way. `make test` runs some of the
steps, `make signals` all.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Container, Iterable
from pathlib import Path

import grpc
import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.commands import rowlock
from support.daemons import answer, begin, owner, refused, states, wait_for_log
from support.kill_file import KillOrder, Place

from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import owner_pb2

SIGNALS = [signal.SIGTERM, signal.SIGINT]


def arguments(checkpoint: Path, pause: KillOrder) -> list[str]:
    return ["--checkpoint", str(checkpoint), "--threads", "2", *pause.arguments]


STARTING = {
    "journal made": ("commit_owner", "after"),
    "before the runtime": ("create_runtime", "before"),
    "half uploaded": ("write_rows", "after"),
    "being read back": ("read_rows", "before"),
    "before the publish": ("commit_publish", "before"),
    "published": ("commit_publish", "after"),
}


def cases(steps: Iterable[str], always: Container[str]) -> list[object]:
    """One case a step, signals in turn; those not always run belong to the campaign."""
    marks = [() if step in always else pytest.mark.campaign for step in steps]
    return [pytest.param(step, SIGNALS[i % 2], marks=marks[i], id=step) for i, step in enumerate(steps)]


@pytest.mark.parametrize(("step", "number"), cases(STARTING, ("half uploaded",)))
def test_while_starting(tiny: Path, tmp_path: Path, step: str, number: signal.Signals) -> None:
    pause = KillOrder(tmp_path / "pause.json")
    socket = tmp_path / "socket"
    places = ["--state", str(tmp_path / "state"), "--socket", str(socket)]
    command = [sys.executable, "-m", "rowlock.cli", "serve", *places, *arguments(tiny, pause)]
    with pause.pause_at(Place(*STARTING[step])):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        pause.wait()
        process.send_signal(number)
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    assert "Traceback" not in log
    assert not socket.exists()
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(tiny), "--threads", "2"]) as again:
        assert answer(again)[1] == owner(again).identity.digest


STEPS = {
    "opened": ("commit_open", "after", "", "CANCELLED"),
    "the undo is read": ("read_rows", "after", "embed", "CANCELLED"),
    "the undo is written": ("sync_file", "before", ".undo", "CANCELLED"),
    "before it is staged": ("commit_staged", "before", "", "CANCELLED"),
    "before the intent": ("commit_intent", "before", "", "CANCELLED"),
    "before the first write": ("write_rows", "before", "embed", "PUBLISHED"),
    "between the writes": ("write_rows", "after", "embed", "PUBLISHED"),
    "before the readback": ("phase", "before", "verify", "PUBLISHED"),
    "before the publish": ("commit_publish", "before", "", "PUBLISHED"),
    "published": ("commit_publish", "after", "", "PUBLISHED"),
}


ALWAYS = ("the undo is written", "before the publish")


@pytest.mark.parametrize(("step", "number"), cases(STEPS, ALWAYS))
def test_during_a_transition(tiny: Path, tmp_path: Path, step: str, number: signal.Signals) -> None:
    pause = KillOrder(tmp_path / "pause.json")
    target = change_rows(tiny, tmp_path / "target", EMBED, [5, 200], negate)
    point, moment, subject, outcome = STEPS[step]
    with DaemonProcess(tmp_path / "state", arguments(tiny, pause)) as daemon:
        old = owner(daemon).identity
        with pause.pause_at(Place(point, moment, subject)):
            going = begin(daemon, target=str(target), request_id="asked")
            pause.wait()
            daemon.process.send_signal(number)
            daemon.process.send_signal(number)  # an operator who has no patience
            wait_for_log(daemon, "owner.stopping")
        assert daemon.process.wait(60) == 0
        going.exception(60)  # the stream ends, with its last event or without
    with DaemonProcess(tmp_path / "state", ["--threads", "2"]) as again:
        record = rowlock("history", "asked", "--json", endpoint=again.client.endpoint).json["record"]
        assert record["state"] == outcome
        assert (owner(again).identity == old) == (outcome == "CANCELLED")
        assert again.client.call(again.client.owner.Verify, owner_pb2.VerifyRequest()).ok


def test_signals_while_it_stops_change_nothing(tiny: Path, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(tiny), "--threads", "2"]) as daemon:
        while daemon.process.poll() is None:
            for number in SIGNALS:
                daemon.process.send_signal(number)
        assert daemon.process.returncode == 0


def test_two_transitions_at_once(tiny: Path, tmp_path: Path) -> None:
    pause = KillOrder(tmp_path / "pause.json")
    first = change_rows(tiny, tmp_path / "first", EMBED, [5], negate)
    second = change_rows(tiny, tmp_path / "second", EMBED, [200], negate)
    with DaemonProcess(tmp_path / "state", arguments(tiny, pause)) as daemon:
        before = answer(daemon)
        with pause.pause_at(Place("sync_file", "before", ".undo")):
            going = begin(daemon, target=str(first))
            pause.wait()
            error = refused(daemon, target=str(second))
            assert error.reason == "TRANSITION_OPEN"
            cause = error.__cause__
            assert isinstance(cause, grpc.RpcError)
            assert cause.code() is grpc.StatusCode.ABORTED
            assert answer(daemon) == before, "requests go on meanwhile"
        events = going.result(60)
        assert states(events)[-1] == "PUBLISHED"
        assert owner(daemon).identity == events[-1].record.to
