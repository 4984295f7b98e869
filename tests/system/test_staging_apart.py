"""Beside decoding every kind of transition is staged in a process of its own; when that ends, nothing is written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from support.checkpoints import EMBED, NORM, change_rows, negate, write_tiny
from support.daemons import begin, states
from support.daemons import owner as owner_of
from support.owners import OwnerHarness

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.plan import Require
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.staging import apart
from rowlock.daemon.staging.orders import CountNonfinite, Digest, Order, Reserve, Settle, Share, Stage
from rowlock.daemon.staging.process import StagingProcess
from rowlock.v1 import inference_pb2, owner_pb2
from rowlock.v1.errors import Reason

WAIT_S = 120


class Watched(StagingProcess):
    """The real one, which notes its orders, and can be ended by one of them."""

    made: ClassVar[list[Watched]]
    deadly: ClassVar[type | None]

    def __init__(self, threads: int) -> None:
        self.orders: list[str] = []
        super().__init__(threads)
        self.made.append(self)

    def submit(self, order: Order, *more: object) -> object:  # type: ignore[override]
        self.orders.append(type(order).__name__)
        if self.deadly is type(order):
            self._process.kill()
        return super().submit(order, *more)  # type: ignore[arg-type]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Watched]]:
    class Here(Watched):
        made: ClassVar[list[Watched]] = []
        deadly = None

    monkeypatch.setattr(apart, "StagingProcess", Here)
    monkeypatch.setattr(apart, "APART_BYTES", 1)
    yield Here
    assert len([process for process in Here.made if process._process.poll() is None]) <= 1, "more than one is kept"
    for process in Here.made:
        process.close()
        process._process.wait(WAIT_S)
    assert not [child for child in psutil.Process().children() if "staging" in " ".join(child.cmdline())]


@pytest.fixture
def clients(owner: OwnerHarness) -> Iterator[None]:
    """Two who ask one question after another."""
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            owner.ask("hello", 300).wait()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    while not owner.core.scheduler.decoding:
        pass
    yield
    stop.set()
    for thread in threads:
        thread.join(WAIT_S)


def device_bytes(owner: OwnerHarness) -> dict[str, bytes]:
    resident = owner.owner.view.resident
    assert resident is not None
    assert owner.verify().ok
    return {name: tensor.digests for name, tensor in resident.model.manifest.tensors.items()}


def b2(owner: OwnerHarness, _tiny: Path, work: Path) -> TransitionRecord:
    return owner.transition(change_rows(_tiny, work / "rows", EMBED, [5, 6, 200], negate), Require.B2)


def b2_of_every_row(owner: OwnerHarness, _tiny: Path, work: Path) -> TransitionRecord:
    return owner.transition(write_tiny(work / "every", seed=3), Require.B2)


def b1(owner: OwnerHarness, _tiny: Path, work: Path) -> TransitionRecord:
    return owner.transition(write_tiny(work / "other", seed=4), Require.B1)


def push(owner: OwnerHarness, _tiny: Path, _work: Path) -> TransitionRecord:
    resident = owner.owner.view.resident
    assert resident is not None
    row_bytes = resident.model.layout.placements[EMBED].tensor.row_bytes
    return owner.push({EMBED: {7: bytes(row_bytes), 250: bytes(row_bytes)}})


def rollback(owner: OwnerHarness, tiny: Path, work: Path) -> TransitionRecord:
    b2_of_every_row(owner, tiny, work)
    return owner.rollback()


def rollback_to_pushed(owner: OwnerHarness, tiny: Path, work: Path) -> TransitionRecord:
    """Pushed rows over a checkpoint: the way back over a B1 reads both."""
    push(owner, tiny, work)
    b1(owner, tiny, work)
    return owner.rollback()


Kind = Callable[[OwnerHarness, Path, Path], TransitionRecord]


def has_images(child: psutil.Process) -> bool:
    """Whether it stages: it has images of a transition, or their memory."""
    paths = [item.path for item in child.memory_maps(grouped=False)]
    paths += [str(path.readlink()) for path in Path(f"/proc/{child.pid}/fd").iterdir()]
    return any("rowlock-images" in path for path in paths)


def campaign(item: object) -> object:
    """Of what `make test` has no time for: see `make kills`."""
    return pytest.param(item, marks=pytest.mark.campaign)


@pytest.mark.parametrize("kind", [b2_of_every_row, *map(campaign, (b2, b1, push, rollback, rollback_to_pushed))])
@pytest.mark.usefixtures("clients")
def test_every_kind_is_staged_apart_and_proved(
    kind: Kind, owner: OwnerHarness, watched: type[Watched], tiny: Path, tmp_path: Path
) -> None:
    before = device_bytes(owner)
    record = kind(owner, tiny, tmp_path)
    assert record.state == "PUBLISHED", record.message
    assert any("Stage" in process.orders for process in watched.made), "it was staged among those who decode"
    after = device_bytes(owner)
    assert (after == before) is (kind is rollback)


@pytest.mark.usefixtures("clients")
def test_a_checkpoint_is_digested_apart(owner: OwnerHarness, watched: type[Watched], tmp_path: Path) -> None:
    plan, target = owner.owner.planner.transition(
        owner.owner.view.resident, write_tiny(tmp_path / "new", seed=9), Require.AUTO, Options()
    )
    target.close()
    assert plan.changes
    assert [process.orders for process in watched.made] == [["Digest", "Forget"]]


@pytest.mark.parametrize("order", [Stage, *map(campaign, (Share, Reserve, Settle, CountNonfinite))])
@pytest.mark.usefixtures("clients")
def test_when_it_is_killed_nothing_was_written_and_the_next_one_works(
    order: type[Order], owner: OwnerHarness, watched: type[Watched], tiny: Path, tmp_path: Path
) -> None:
    kind = b1 if order is CountNonfinite else b2
    target = write_tiny(tmp_path / "t", seed=4) if kind is b1 else change_rows(tiny, tmp_path / "t", EMBED, [5], negate)
    require = Require.B1 if kind is b1 else Require.B2
    before, tokens = device_bytes(owner), owner.tokens()
    watched.deadly = order
    record = owner.transition(target, require)
    assert (record.state, record.reason) == ("FAILED", Reason.STAGING_FAILED), record.message
    assert "SIGKILL" in record.message
    assert (device_bytes(owner), owner.tokens()) == (before, tokens)
    watched.deadly = None
    assert owner.transition(target, require).state == "PUBLISHED"


@pytest.mark.usefixtures("clients")
def test_when_it_is_killed_while_digesting_the_plan_is_refused(
    owner: OwnerHarness, watched: type[Watched], tmp_path: Path
) -> None:
    target = write_tiny(tmp_path / "t", seed=4)
    watched.deadly = Digest
    with pytest.raises(Exception, match="SIGKILL") as caught:
        owner.transition(target)
    assert getattr(caught.value, "reason", None) is Reason.STAGING_FAILED
    watched.deadly = None
    assert owner.transition(target).state == "PUBLISHED"


@pytest.mark.parametrize("tensor", [EMBED, NORM], ids=["changed group", "unchanged group"])
@pytest.mark.usefixtures("clients")
def test_a_byte_flipped_under_a_cached_manifest_is_refused_there_too(
    owner: OwnerHarness, watched: type[Watched], tiny: Path, tmp_path: Path, tensor: str
) -> None:
    target = change_rows(tiny, tmp_path / "target", EMBED, [2], negate)
    row = 2 if tensor == EMBED else 0
    tampered = change_rows(target, tmp_path / "tampered", tensor, [row], lambda old: bytes([old[0] ^ 1]) + old[1:])
    with Checkpoint.open(target) as good, Checkpoint.open(tampered) as bad:
        owner.core.stores.cache().store(bad, owner.core.loader.hasher.manifest(good, {}))
    (process,) = watched.made
    process.orders.clear()
    before = device_bytes(owner)
    record = owner.transition(tampered)
    assert (record.state, record.reason) == ("FAILED", Reason.TARGET_CHANGED)
    assert tensor in record.message
    assert "Stage" in process.orders
    process._process.wait(WAIT_S)  # it may hold images, so it is not kept
    assert device_bytes(owner) == before


@pytest.mark.usefixtures("clients")
def test_drift_is_found_there_too(owner: OwnerHarness, watched: type[Watched], tiny: Path, tmp_path: Path) -> None:
    owner.stray_write("embed", 9)
    record = b2_of_every_row(owner, tiny, tmp_path)
    assert (record.state, record.reason) == ("FAILED", Reason.DRIFT), record.message
    assert "Settle" in watched.made[-1].orders


@pytest.mark.usefixtures("clients")
def test_a_small_transition_is_over_before_a_process_would_have_started(
    owner: OwnerHarness, watched: type[Watched], monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(apart, "APART_BYTES", 1 << 20)
    assert b2(owner, tiny, tmp_path).state == "PUBLISHED"
    assert watched.made == []


def test_where_nobody_decodes_one_is_made_ready_and_not_used(
    owner: OwnerHarness, watched: type[Watched], tiny: Path, tmp_path: Path
) -> None:
    assert b2(owner, tiny, tmp_path).state == "PUBLISHED"
    assert owner.rollback().state == "PUBLISHED"
    assert [process.orders for process in watched.made] == [[]]


@pytest.mark.usefixtures("clients")
def test_one_process_stages_one_transition_after_another_and_keeps_no_memory(
    owner: OwnerHarness, watched: type[Watched], tiny: Path, tmp_path: Path
) -> None:
    for seed in (3, 4):
        assert owner.transition(write_tiny(tmp_path / f"{seed}", seed=seed)).state == "PUBLISHED"
        (process,) = watched.made
        while not process.idle:
            pass
        assert process.orders[-1] == "Forget"
        child = psutil.Process(process._process.pid)
        assert not has_images(child)
    assert process.orders.count("Share") == 4


@pytest.mark.usefixtures("clients")
def test_one_that_dies_while_it_waits_is_replaced(
    owner: OwnerHarness, watched: type[Watched], tiny: Path, tmp_path: Path
) -> None:
    assert b2(owner, tiny, tmp_path).state == "PUBLISHED"
    (process,) = watched.made
    while not process.idle:
        pass
    process._process.kill()
    process._process.wait(WAIT_S)
    assert owner.transition(tiny).state == "PUBLISHED"
    assert len(watched.made) == 2


def test_a_process_that_cannot_be_started_is_no_reason_to_fail(
    owner: OwnerHarness, monkeypatch: pytest.MonkeyPatch, clients: None, tiny: Path, tmp_path: Path
) -> None:
    def refuse(_threads: int) -> StagingProcess:
        raise BlockingIOError("too many processes")

    monkeypatch.setattr(apart, "StagingProcess", refuse)
    monkeypatch.setattr(apart, "APART_BYTES", 1)
    assert b2(owner, tiny, tmp_path).state == "PUBLISHED"


def test_the_daemon_outlives_it_and_says_so(tmp_path: Path) -> None:
    large = {"hidden_size": 512, "intermediate_size": 4096}  # 26 MB
    base, target = (write_tiny(tmp_path / f"{seed}", seed=seed, **large) for seed in (3, 4))
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(base), "--threads", "1"]) as daemon:
        client, stop = daemon.client, threading.Event()
        tokens: dict[str, set[tuple[int, ...]]] = {}

        def ask() -> None:
            while not stop.is_set():
                request = inference_pb2.GenerateRequest(prompt="hello", max_tokens=200, ignore_eos=True)
                messages = list(client.inference.Generate(request, timeout=WAIT_S))
                (identity,) = {message.identity.digest for message in messages}
                tokens.setdefault(identity, set()).add(tuple(token for item in messages for token in item.tokens))

        asker = threading.Thread(target=ask)
        asker.start()
        try:
            old = owner_of(daemon).identity.digest
            while not tokens:
                pass
            process = psutil.Process(daemon.process.pid)
            events = begin(daemon, target=str(target), require=owner_pb2.REQUIRE_B2)
            child = None
            while child is None and not events.done():
                child = next((item for item in process.children() if has_images(item)), None)
            assert child is not None, "nothing was done in another process"
            child.kill()
            ended = events.exception(WAIT_S)
            reason = ended.reason if ended is not None else events.result()[-1].record.reason
            assert reason == "STAGING_FAILED"
            assert owner_of(daemon).identity.digest == old
            assert states(begin(daemon, target=str(target)).result(WAIT_S))[-1] == "PUBLISHED"
        finally:
            stop.set()
            asker.join(WAIT_S)
    assert len(tokens) == 2
    assert all(len(answers) == 1 for answers in tokens.values())
