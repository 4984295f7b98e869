"""SIGKILL at named points of the real daemon: afterwards the old or the new identity, proved, and a history that fits.

`make kills` does all of them on the real model; `make test` some of them, on the tiny one and on the real one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.commands import rowlock
from support.daemons import answer, owner, refused, states, transition
from support.kill_file import KillOrder, Place

from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import owner_pb2
from rowlock.v1.errors import Reason

B2, B1 = owner_pb2.REQUIRE_B2, owner_pb2.REQUIRE_B1


@dataclass(frozen=True)
class Kill:
    """Where the process dies, and what must be the case afterwards.

    Attributes:
        outcome: of the transition in the history; empty: it is not there.
        last: the last state of it that the dead process made durable.

    """

    point: str
    moment: str
    outcome: str
    last: str = ""
    subject: str = ""
    skip: int = 0
    level: owner_pb2.Require.ValueType = B2

    @property
    def is_new(self) -> bool:
        return self.outcome == "PUBLISHED"


KILLS = {
    "before the opening is durable": Kill("commit_open", "before", ""),
    "opened": Kill("commit_open", "after", "FAILED", "PLANNED"),
    "space reserved": Kill("reserve_file", "after", "FAILED", "PLANNED", ".undo"),
    "before it is staged": Kill("commit_staged", "before", "FAILED", "PLANNED"),
    "undo read half": Kill("read_rows", "after", "FAILED", "STAGED", "embed"),
    "undo written, not synced": Kill("sync_file", "before", "FAILED", "STAGED", ".undo"),
    "undo renamed, directory not synced": Kill("rename_file", "after", "FAILED", "STAGED", ".undo"),
    "before the intent is durable": Kill("commit_intent", "before", "FAILED", "STAGED"),
    "intent durable": Kill("commit_intent", "after", "ROLLED_BACK", "JOURNALED"),
    "before the first write": Kill("write_rows", "before", "ROLLED_BACK", "JOURNALED"),
    "between two writes": Kill("write_rows", "after", "ROLLED_BACK", "JOURNALED"),
    "written, not fenced": Kill("fence", "before", "ROLLED_BACK", "JOURNALED", skip=1),
    "while it is read back": Kill("phase", "before", "ROLLED_BACK", "JOURNALED", "verify"),
    "before the publish is durable": Kill("commit_publish", "before", "ROLLED_BACK", "JOURNALED"),
    "published": Kill("commit_publish", "after", "PUBLISHED"),
    "before the record is completed": Kill("commit_amend", "before", "PUBLISHED"),
    "reload: old closed": Kill("close_runtime", "after", "ROLLED_BACK", "JOURNALED", level=B1),
    "reload: half uploaded": Kill("write_rows", "after", "ROLLED_BACK", "JOURNALED", skip=2, level=B1),
    "reload: before the publish is durable": Kill("commit_publish", "before", "ROLLED_BACK", "JOURNALED", level=B1),
    "reload: published": Kill("commit_publish", "after", "PUBLISHED", level=B1),
}
ALWAYS_TINY = ("between two writes", "before the publish is durable")
ALWAYS_REAL = ("written, not fenced",)


def cases(always: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, marks=() if name in always else pytest.mark.campaign) for name in KILLS]


@pytest.mark.parametrize("name", cases(ALWAYS_TINY))
def test_a_kill_on_the_tiny_model(tiny: Path, tmp_path: Path, name: str) -> None:
    check(tiny, change_rows(tiny, tmp_path / "target", EMBED, [5, 200], negate), tmp_path, KILLS[name])


@pytest.mark.parametrize("name", cases(ALWAYS_REAL))
def test_a_kill_on_the_real_model(real_model: Path, tmp_path: Path, name: str) -> None:
    target = change_rows(real_model, tmp_path / "target", EMBED, [5, 9000, 40000], negate)
    check(real_model, target, tmp_path, KILLS[name])


def check(base: Path, target: Path, directory: Path, kill: Kill) -> None:
    """Die during a transition from base to target; start again; look at everything."""
    order, state = KillOrder(directory / "kill.json"), directory / "state"
    with DaemonProcess(state, ["--checkpoint", str(base), "--threads", "2", *order.arguments]) as daemon:
        old, before = owner(daemon).identity, answer(daemon)
        head = rowlock("history", "--head", endpoint=daemon.client.endpoint).out.strip()
        new = plan(daemon, target).to
        described = daemon.client.call(daemon.client.owner.Describe, owner_pb2.DescribeRequest())
        assert list(described.test_options) == [f"kill_file={order.file}"], "it is not hidden"
        order.die_at(Place(kill.point, kill.moment, kill.subject, kill.skip))
        with contextlib.suppress(ClientError):
            transition(daemon, target=str(target), require=kill.level, request_id="killed")
        assert daemon.process.wait(60) == -9
        assert order.met, "it died where it was told to"
    with DaemonProcess(state, ["--threads", "2"]) as again:
        endpoint = again.client.endpoint
        assert owner(again).identity == (new if kill.is_new else old)
        assert (answer(again) == before) == (not kill.is_new)
        verified = again.client.call(again.client.owner.Verify, owner_pb2.VerifyRequest())
        assert (verified.ok, verified.weights) == (True, (new if kill.is_new else old).weights)
        check_history(endpoint, kill)
        assert rowlock("history", "--verify", "--since", head, endpoint=endpoint).code == 0
        check_request_id(again, base, target, kill)
        assert transition(again, target=str(target))[-1].state in (
            owner_pb2.TRANSITION_STATE_NOOP if kill.is_new else owner_pb2.TRANSITION_STATE_PUBLISHED,
        ), "nothing is in the way of the next"


def plan(daemon: DaemonProcess, target: Path) -> owner_pb2.Plan:
    return daemon.client.call(daemon.client.owner.Plan, owner_pb2.PlanRequest(target=str(target))).plan


def check_request_id(daemon: DaemonProcess, base: Path, target: Path, kill: Kill) -> None:
    """Once durable it is the killed transition's: for the same request the same transition, for another none."""
    if kill.outcome:
        same = transition(daemon, target=str(target), require=kill.level, request_id="killed")
        assert states(same)[-1] == kill.outcome
        other = refused(daemon, target=str(base), require=kill.level, request_id="killed")
        assert other.reason == Reason.REQUEST_ID_REUSED


def check_history(endpoint: str, kill: Kill) -> None:
    """The killed transition is told of as it ended, by the words of a user."""
    if not kill.outcome:
        assert rowlock("history", "killed", endpoint=endpoint).code == 3
        return
    told = rowlock("history", "killed", "--json", endpoint=endpoint).json
    assert told["record"]["state"] == kill.outcome
    events = [event["state"] for event in told["events"]]
    if kill.is_new:
        assert events == ["PLANNED", "STAGED", "JOURNALED", "APPLYING", "VERIFYING", "PUBLISHED"]
    else:
        assert told["record"]["reason"] == "INTERRUPTED"
        assert events[-2:] == [kill.last, kill.outcome]
