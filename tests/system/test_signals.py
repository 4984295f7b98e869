"""SIGTERM and SIGINT at every step of starting, of a transition and of stopping: the daemon ends in good order.

It ends with 0, whatever it was doing; before the first device write a transition ends in CANCELLED, after it
it is brought to its end; the next daemon finds nothing in its way. `make test` runs some of the
steps, `make signals` all.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.commands import rowlock
from support.daemons import answer, begin, owner, refused, states

from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import owner_pb2

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@dataclass(frozen=True)
class Pause:
    """A daemon's thread waits at a named point."""

    file: Path

    @property
    def met(self) -> bool:
        return self.file.with_name(self.file.name + ".met").exists()

    @contextmanager
    def at(self, point: str, moment: str, subject: str = "", skip: int = 0) -> Iterator[None]:
        """Have it wait there. On entry: armed. On exit: it has been let go."""
        order = {"point": point, "moment": moment, "subject": subject, "skip": skip, "act": "wait"}
        self.file.write_text(json.dumps(order))
        yield
        self.file.unlink(missing_ok=True)
        self.file.with_name(self.file.name + ".met").unlink(missing_ok=True)

    def wait(self) -> None:
        deadline = time.monotonic() + 60
        while not self.met:
            assert time.monotonic() < deadline, "nothing came by the point"
            time.sleep(0.01)


def arguments(checkpoint: Path, pause: Pause) -> list[str]:
    return ["--checkpoint", str(checkpoint), "--threads", "2", "--test-kill-file", str(pause.file)]


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


@pytest.mark.parametrize(("step", "number"), cases(STARTING, ("before the runtime", "half uploaded", "published")))
def test_while_starting(tiny: Path, tmp_path: Path, step: str, number: signal.Signals) -> None:
    pause = Pause(tmp_path / "pause.json")
    socket = tmp_path / "socket"
    places = ["--state", str(tmp_path / "state"), "--socket", str(socket)]
    command = [sys.executable, "-m", "rowlock.cli", "serve", *places, *arguments(tiny, pause)]
    with pause.at(*STARTING[step]):
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


ALWAYS = ("opened", "the undo is written", "before the first write", "before the publish")


@pytest.mark.parametrize(("step", "number"), cases(STEPS, ALWAYS))
def test_during_a_transition(tiny: Path, tmp_path: Path, step: str, number: signal.Signals) -> None:
    pause = Pause(tmp_path / "pause.json")
    target = change_rows(tiny, tmp_path / "target", EMBED, [5, 200], negate)
    point, moment, subject, outcome = STEPS[step]
    with DaemonProcess(tmp_path / "state", arguments(tiny, pause)) as daemon:
        old = owner(daemon).identity
        with pause.at(point, moment, subject):
            going = begin(daemon, target=str(target), request_id="asked")
            pause.wait()
            daemon.process.send_signal(number)
            daemon.process.send_signal(number)  # an operator who has no patience
        assert daemon.process.wait(60) == 0
        going.exception(60)  # the stream ends, with its last event or without
    with DaemonProcess(tmp_path / "state", ["--threads", "2"]) as again:
        record = rowlock("history", "asked", "--json", endpoint=again.client.endpoint).json["record"]
        assert record["state"] == outcome
        assert (owner(again).identity == old) == (outcome == "CANCELLED")
        assert again.client.call(again.client.owner.Verify, owner_pb2.VerifyRequest()).ok


@pytest.mark.campaign
def test_signals_while_it_stops_change_nothing(tiny: Path, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(tiny), "--threads", "2"]) as daemon:
        while daemon.process.poll() is None:
            for number in SIGNALS:
                daemon.process.send_signal(number)
        assert daemon.process.returncode == 0


def test_two_transitions_at_once(tiny: Path, tmp_path: Path) -> None:
    pause = Pause(tmp_path / "pause.json")
    first = change_rows(tiny, tmp_path / "first", EMBED, [5], negate)
    second = change_rows(tiny, tmp_path / "second", EMBED, [200], negate)
    with DaemonProcess(tmp_path / "state", arguments(tiny, pause)) as daemon:
        before = answer(daemon)
        with pause.at("sync_file", "before", ".undo"):
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
