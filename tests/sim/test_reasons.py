"""Every reason of the one error table comes about: none is only written down."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from support.checkpoints import EMBED, K0, change_rows
from support.daemons import refused, transition
from support.owners import Answer
from support.prefilling import fails, remote_owner

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.plan import Require
from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.daemon.answering.answers import Answers
from rowlock.daemon.answering.meter import Meter
from rowlock.daemon.answering.question import Question
from rowlock.daemon.owner.admission import Admission
from rowlock.daemon.owner.options import Drain, Options
from rowlock.daemon.owner.outcome import reason_of
from rowlock.daemon.owner.pushing import PushedRows
from rowlock.v1 import owner_pb2
from rowlock.v1.errors import Reason
from sim.device import Device
from sim.disk import Crash, Disk
from sim.models import Models
from sim.process import Process
from sim.scenarios import World, flips, stuck


class Stage:
    """A running simulated owner on checkpoints of its own, which a test may spoil."""

    def __init__(self, root: Path) -> None:
        self.models = Models.make(root / "models")
        self.trouble: Callable[[str], str] = lambda _operation: ""
        self.disk, self.device = Disk(), Device()
        self.process = self.start("p").start(self.models["a"])

    def start(self, name: str) -> Process:
        return Process(self.disk, self.device, name, lambda _device, operation, _subject: self.trouble(operation))

    def to(self, name: str, require: Require = Require.B2, **options: object) -> str:
        """The reason in the record of a transition."""
        return self.process.record(self.process.transition(self.models[name], require, **options)).reason

    def admission(self, **changes: object) -> Admission:
        plan, target = self.process.plan(self.models["b"], Require.B2)
        return replace(Admission("transition", plan, target, Options()), **changes)  # type: ignore[arg-type]

    def failure(self, answer: Answer) -> str:
        with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is, its reason is looked at
            answer.wait()
        return reason_of(caught.value)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.process.close()


def cancelled(stage: Stage) -> str:
    stage.process.ask(50)
    stage.process.turn()
    asked = stage.process.owner.admit(stage.admission())
    stage.process.turn_until(asked.done)
    stage.process.owner.cancel(asked.result())
    stage.process.settle()
    return stage.process.record(asked.result()).reason


def drained(stage: Stage) -> str:
    answer = stage.process.ask(50)
    stage.process.turn()
    stage.to("b", drain=Drain.CANCEL)
    return stage.failure(answer)


def drift(stage: Stage) -> str:
    stage.device.slots["embed"][5] ^= 1
    return stage.to("b")


def empty(stage: Stage) -> str:
    stage.process.unload()
    answer = stage.process.ask()
    stage.process.turn()
    return stage.failure(answer)


def generation_stale(stage: Stage) -> str:
    late = stage.admission()
    stage.to("c")
    stage.process.admit(late)
    return ""


def internal(stage: Stage) -> str:
    def bug(operation: str) -> str:
        if operation == "write_rows":
            stage.trouble = lambda _operation: ""
            raise ZeroDivisionError("a bug")
        return ""

    stage.trouble = bug
    return stage.to("b")


def interrupted(stage: Stage) -> str:
    disk = [stage.disk.copy()]
    stage.process.points.observers.append(
        lambda point, *_: disk.append(stage.disk.copy()) if point == "fence" else None
    )
    stage.to("b")
    stage.process.close()
    stage.disk, stage.device = disk[-1].after(Crash.KILLED, 0), stage.device.after_process(survives=True, seed=0)
    stage.process = stage.start("q").start()
    return stage.process.record(stage.process.journal.transitions(1)[0].id).reason


def irreversible(stage: Stage) -> str:
    (stage.models["a"] / "model.safetensors").unlink()
    return stage.to("program", Require.B1)


def journal_failed(stage: Stage) -> str:
    def full(operation: str, path: str) -> None:
        if operation == "write" and "undo" in path:
            raise OSError(errno.ENOSPC, "injected", path)

    stage.disk.fail = full
    return stage.to("b")


def memory_short(stage: Stage) -> str:
    rows = {EMBED: stage.process.owner.view.resident.model.layout.placements[EMBED].tensor}  # type: ignore[union-attr]
    PushedRows(rows, bytes_max=10).add(EMBED, 0, bytes(512))
    return ""


def nonfinite(stage: Stage) -> str:
    nan = np.full(256, 0x7FC0, np.uint16).tobytes()
    change_rows(stage.models["a"], stage.models["nan"], K0, [1], lambda _row: nan)
    return stage.to("nan")


def device_failed(stage: Stage) -> str:
    def lost(operation: str) -> str:
        if operation == "fence":
            raise DeviceError(DeviceFault.LOST, "injected")
        return ""

    stage.trouble = lost
    return stage.to("b")


def cache_exceeded(stage: Stage) -> str:
    def full(operation: str) -> str:
        if operation == "open_sequence":
            raise DeviceError(DeviceFault.CAPACITY, "injected")
        return ""

    stage.trouble = full
    answer = stage.process.ask(4)
    stage.process.turn()
    return stage.failure(answer)


def quarantined(stage: Stage) -> str:
    hook = stuck()
    stage.trouble = lambda operation: hook(stage.device, operation, "")
    stage.to("b")
    assert stage.process.owner.view.quarantined
    asked = stage.process.owner.verify()
    stage.process.turn_until(asked.done)
    raise asked.exception()  # type: ignore[misc]


def queue_full(stage: Stage) -> str:
    answers = [stage.process.ask(1) for _ in range(300)]
    stage.process.turn()
    return stage.failure(answers[-1])


def stopping(stage: Stage) -> str:
    late = stage.admission()
    stage.process.owner.stop()
    stage.process.admit(late)
    return ""


def target_changed(stage: Stage) -> str:
    late = stage.admission()
    path = stage.models["b"] / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    return stage.process.record(stage.process.admit(late)).reason


def target_invalid(stage: Stage) -> str:
    (stage.models["b"] / "model.safetensors").write_bytes(b"no checkpoint")
    return stage.to("b")


def transition_open(stage: Stage) -> str:
    late = stage.admission()
    stage.process.ask(40)
    stage.process.turn()
    first = stage.process.owner.admit(stage.admission())
    stage.process.turn_until(first.done)
    second = stage.process.owner.admit(late)
    stage.process.turn_until(second.done)
    raise second.exception()  # type: ignore[misc]


def verify_mismatch(stage: Stage) -> str:
    hook = flips(1)()
    stage.trouble = lambda operation: hook(stage.device, operation, "")
    return stage.to("b")


def not_cancellable(stage: Stage) -> str:
    asked = stage.process.owner.cancel("no such transition")
    stage.process.turn_until(asked.done)
    raise asked.exception()  # type: ignore[misc]


def context_exceeded(stage: Stage) -> str:
    answer = stage.process.ask(1000)
    stage.process.turn()
    return stage.failure(answer)


def answered(stage: Stage, question: Question, stall_s: float = 60.0) -> None:
    """Ask as gRPC and HTTP do, and read every piece; the loop has a turn between two of them."""
    owner = stage.process.owner
    writers = ThreadPoolExecutor(1)
    answers = Answers(owner, Meter(CollectorRegistry(), owner._context.clock.monotonic), stall_s, writers)

    async def read() -> None:
        async with answers.ask(question, "grpc") as answer:
            stage.process.settle()
            await answer.started()
            async for _piece in answer.pieces():
                await asyncio.sleep(0)
                await asyncio.sleep(0)

    asyncio.run(read())


IN_PROCESS: dict[Reason, Callable[[Stage], object]] = {
    Reason.ARGUMENT_INVALID: lambda stage: PushedRows({}, 1).add("no such tensor", 0, b""),
    Reason.CACHE_EXCEEDED: cache_exceeded,
    Reason.CANCELLED: cancelled,
    Reason.CONTEXT_EXCEEDED: context_exceeded,
    Reason.DEADLINE_PASSED: lambda stage: answered(stage, Question((1, 2), 4, deadline_s=0)),
    Reason.DEVICE_FAILED: device_failed,
    Reason.DRAINED: drained,
    Reason.DRIFT: drift,
    Reason.EMPTY: empty,
    Reason.ETAG_STALE: lambda stage: stage.process.admit(stage.admission(etag="another")),
    Reason.GENERATION_STALE: generation_stale,
    Reason.IDENTITY_DIFFERS: lambda stage: answered(stage, Question((1, 2), 4, identity="0" * 12)),
    Reason.INTERNAL: internal,
    Reason.INTERRUPTED: interrupted,
    Reason.IRREVERSIBLE: irreversible,
    Reason.JOURNAL_FAILED: journal_failed,
    Reason.MEMORY_SHORT: memory_short,
    Reason.NONFINITE: nonfinite,
    Reason.NOT_CANCELLABLE: not_cancellable,
    Reason.NOT_QUARANTINED: lambda stage: stage.process.owner.release_quarantine("somebody", "no reason"),
    Reason.PLAN_REFUSED: lambda stage: stage.to("program", Require.B2),
    Reason.QUARANTINED: quarantined,
    Reason.QUEUE_FULL: queue_full,
    Reason.READER_STALLED: lambda stage: answered(stage, Question((1, 2), 4), stall_s=0),
    Reason.ROLLBACK_UNAVAILABLE: lambda stage: stage.process.rollback(),
    Reason.STOPPING: stopping,
    Reason.TARGET_CHANGED: target_changed,
    Reason.TARGET_INVALID: target_invalid,
    Reason.TARGET_NOT_FOUND: lambda stage: stage.to("no such checkpoint"),
    Reason.TRANSITION_OPEN: transition_open,
    Reason.VERIFY_MISMATCH: verify_mismatch,
}
AT_THE_API = {Reason.NOT_FOUND, Reason.PLAN_CHANGED, Reason.REQUEST_ID_REUSED}
OF_ANOTHER_PROCESS = {Reason.SOURCE_ABSENT, Reason.SOURCE_FAILED, Reason.STAGING_FAILED}


def test_every_reason_is_here() -> None:
    assert sorted([*IN_PROCESS, *AT_THE_API, *OF_ANOTHER_PROCESS]) == sorted(Reason)


@pytest.mark.parametrize("reason", IN_PROCESS)
def test_it_comes_about(stage: Stage, reason: Reason) -> None:
    try:
        found = IN_PROCESS[reason](stage)
    except Exception as error:  # noqa: BLE001 - a refusal is the other way to say it
        found = reason_of(error)
    assert found == reason


def test_those_of_the_api_come_about(tmp_path: Path, world: World) -> None:
    """On the real daemon process."""
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(world.models["a"]), "--threads", "1"]) as daemon:
        target = str(world.models["a"])
        assert refused(daemon, target=target, plan_digest="00").reason == Reason.PLAN_CHANGED
        transition(daemon, target=target, request_id="r")
        other = str(world.models["b"])
        assert refused(daemon, target=other, request_id="r").reason == Reason.REQUEST_ID_REUSED
        with pytest.raises(ClientError) as caught:
            daemon.client.call(daemon.client.owner.GetTransition, owner_pb2.GetTransitionRequest(id="none"))
        assert caught.value.reason == Reason.NOT_FOUND


def test_those_of_a_source_come_about(tmp_path: Path, world: World) -> None:
    """With a real source process."""
    checkpoint = world.models["a"]
    with remote_owner(tmp_path / "absent", checkpoint, {"python": "/no/such/python"}, wait=False) as remote:
        remote.until(lambda view: view.state == "ABSENT")
        assert fails(remote.ask("a", 4)).reason is Reason.SOURCE_ABSENT
    with remote_owner(tmp_path / "failed", checkpoint) as remote:
        os.kill(remote.view.pid, signal.SIGSTOP)
        answer = remote.ask("a", 4)
        remote.until(lambda view: view.live == 1)
        os.kill(remote.view.pid, signal.SIGKILL)
        assert fails(answer).reason is Reason.SOURCE_FAILED
