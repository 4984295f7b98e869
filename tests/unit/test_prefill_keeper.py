"""The owner's hold on a source, with real processes: what arrives, how its end is noticed, that nothing is left."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.prefill import FACTS, WAIT_S, prefill_of

from rowlock.daemon.prefill import keeper as keeper_module
from rowlock.daemon.prefill.keeper import SourceKeeper, SourceState, SourceStatus
from rowlock.daemon.prefill.life import Arrival, Kill, Life, Outbox, Silence, SourceEndedError
from rowlock.daemon.prefill.protocol.frames import (
    FRAME_MAX,
    HEADER,
    MAGIC,
    VERSION,
    Done,
    Failed,
    Memory,
    Refusal,
    Release,
    pack,
    parse,
)
from rowlock.daemon.prefill.protocol.hello import hello_of
from rowlock.daemon.prefill.protocol.link import Link, Received
from rowlock.daemon.prefill.settings import SourceSettings

TESTS = Path(__file__).resolve().parents[1]
PROMPT = (3, 1, 4, 1, 5)


@contextlib.contextmanager
def closing_fd(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)


class Watched:
    """A keeper, and what it has told."""

    def __init__(self, keeper: SourceKeeper, news: queue.Queue[None]) -> None:
        self.keeper = keeper
        self._news = news

    def until(self, met: Callable[[SourceStatus], bool]) -> SourceStatus:
        while not met(status := self.keeper.status):
            self._news.get(timeout=WAIT_S)
        return status

    def ready(self) -> SourceStatus:
        return self.until(lambda status: status.state is SourceState.READY)

    def next(self) -> Arrival:
        while (arrival := self.keeper.take()) is None:
            self._news.get(timeout=WAIT_S)
        arrival.let_go()
        return arrival

    def last(self) -> Arrival:
        """The next arrival that ends a prompt, or all of them."""
        while not isinstance((arrival := self.next()).frame, Done | Failed | None):
            pass
        return arrival


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Makes keepers of sources without a model. Afterwards no descriptor and no process is left."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    monkeypatch.setattr(keeper_module, "BACKOFF_S", (0.0,))
    before = len(list(Path("/proc/self/fd").iterdir()))
    watched: list[Watched] = []

    def make(check: Callable[[Any], None] = lambda _facts: None, *, start: bool = True, **settings: Any) -> Watched:
        news: queue.Queue[None] = queue.Queue()
        chosen = SourceSettings(factory="support.prefill:create", **settings)
        keeper = SourceKeeper(chosen, tmp_path, check, lambda: news.put(None), lambda *_args, **_fields: None)
        watched.append(Watched(keeper, news))
        if start:
            keeper.start()
        return watched[-1]

    yield make
    for item in watched:
        item.keeper.close()
        item.keeper.join()
        item.keeper.close()
        item.keeper.send(Release(1, 1))
        assert item.keeper.status.state is SourceState.CLOSED
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_source_is_started_announces_itself_and_computes(watch: Callable[..., Watched]) -> None:
    source = watch()
    assert source.ready().facts == FACTS
    source.keeper.send(prefill_of(1, PROMPT))
    first = source.next()
    assert isinstance(first.frame, Memory)
    assert first.memory is not None
    assert isinstance(source.last().frame, Done)


def test_a_prompt_that_was_sent_before_the_source_was_ready_is_computed(watch: Callable[..., Watched]) -> None:
    source = watch()
    source.until(lambda status: status.pid > 0)
    source.keeper.send(prefill_of(1, PROMPT))
    assert isinstance(source.last().frame, Done)


def test_a_prompt_that_was_sent_before_there_was_a_source_is_computed(watch: Callable[..., Watched]) -> None:
    source = watch(start=False)
    source.keeper.send(prefill_of(1, PROMPT))
    source.keeper.start()
    assert isinstance(source.last().frame, Done)


def test_the_first_of_a_bad_source_s_restarts_come_quickly_and_later_ones_do_not(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not enough that it says that it is done: what it sent has to become a sequence."""
    waits: list[float] = []
    source = watch(extra={"fault": "die", "at": "1"}, start=False)
    monkeypatch.setattr(keeper_module, "BACKOFF_S", (0.1, 0.5, 2.0))
    monkeypatch.setattr(source.keeper._closing, "wait", waits.append)
    source.keeper.start()
    for life in range(6):
        source.until(lambda status, life=life: (status.state, status.restarts) == (SourceState.READY, life))
        if life == 4:
            source.keeper.note_good()
        source.keeper.send(prefill_of(life + 1, PROMPT))
        assert source.last().reason == "closed its end"
    source.until(lambda status: status.restarts == 6)
    assert waits == [0.1, 0.5, 2.0, 2.0, 0.1, 0.5]


def test_a_source_that_cannot_even_be_minded_is_absent_and_tried_again(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No descriptor is left for the pair of sockets; then something that nobody thought of."""
    pair, troubles = Link.pair, [OSError(24, "Too many open files"), RuntimeError("whatever")]

    def troubled() -> Any:
        if troubles:
            raise troubles.pop(0)
        return pair()

    monkeypatch.setattr(Link, "pair", troubled)
    source = watch()
    assert source.last().reason == "[Errno 24] Too many open files"
    assert source.last().reason == "could not be minded: RuntimeError('whatever')"
    assert source.ready().restarts == 2


def test_an_order_to_end_one_life_does_not_end_the_next(watch: Callable[..., Watched]) -> None:
    source = watch(extra={"at": "1", "fault": "die"})
    pid = source.ready().pid
    source.keeper.send(prefill_of(1, PROMPT))
    assert isinstance(source.next().frame, Memory), "the owner is slow to look at it"
    again = source.until(lambda status: status.state is SourceState.READY and status.pid != pid)
    source.keeper.kill("sent a span of a request that there never was")
    assert source.keeper._outbox.kill == Kill("sent a span of a request that there never was", 1)
    assert (source.next().frame, source.keeper._doomed) == (None, False)
    source.keeper.send(prefill_of(2, PROMPT[:3]))
    assert isinstance(source.next().frame, Memory), "it computes in peace"
    assert source.keeper.status.pid == again.pid


def test_a_source_that_was_killed_is_started_again(watch: Callable[..., Watched]) -> None:
    source = watch(extra={"at": "1", "fault": "die"})
    pid = source.ready().pid
    source.keeper.send(prefill_of(1, PROMPT))
    ended = source.last()
    assert (ended.frame, ended.reason) == (None, "closed its end")
    again = source.until(lambda status: status.state is SourceState.READY and status.pid != pid)
    assert again.restarts == 1


def test_a_source_that_is_silent_over_a_prompt_is_given_up(watch: Callable[..., Watched]) -> None:
    source = watch(extra={"at": "1", "fault": "stop"}, silence_s=0.5)
    source.ready()
    source.keeper.send(prefill_of(1, PROMPT))
    assert source.last().reason == "said nothing of the prompt that it has for 0.5 s"
    source.ready()


def test_a_source_that_has_nothing_to_say_is_not_silent() -> None:
    link, other = Link.pair()
    outbox = Outbox()
    life = Life(SourceSettings(silence_s=7), 1, link, outbox, lambda _facts: None, lambda _arrival: None)
    assert life._patience() is not None, "it has to announce itself"
    life._take(Received(hello_of(FACTS)))
    assert patience(life) is None
    for frame in (prefill_of(1, PROMPT), prefill_of(2, PROMPT), Release(1, 3)):
        life._send(frame)
        assert patience(life) is not None
    life._take(Received(Done(2, 3, 0, 1, 50, 0)))
    assert patience(life) is None
    while not life._send_all():
        outbox.put(prefill_of(3, PROMPT))
    life._working.clear()
    assert patience(life) is not None, "it does not even take what it is sent"
    for end in (link, other, outbox):
        end.close()


def patience(life: Life) -> float | None:
    life._expect(blocked=life._send_all())
    return life._patience()


def test_silence_is_not_forgotten_when_a_prompt_is_given_up_and_another_comes() -> None:
    now = [100.0]
    silence = Silence(lambda: now[0])
    silence.expect(something=True)
    for _ in range(3):
        now[0] += 60
        silence.expect(something=False)
        now[0] += 1000
        silence.expect(something=True)
    assert silence.seconds == 180
    silence.broken()
    now[0] += 5
    assert silence.seconds == 5
    silence.expect(something=False)
    silence.broken()
    now[0] += 5
    assert (silence.seconds, silence.expected) == (0, False)


def test_a_source_that_does_not_announce_itself_is_given_up(watch: Callable[..., Watched]) -> None:
    source = watch(extra={"fault": "silent start"}, start_s=0.5)
    assert source.last().reason == "did not announce itself for 0.5 s"


def test_a_source_that_does_not_fit_is_refused_with_the_reason(watch: Callable[..., Watched]) -> None:
    def check(_facts: Any) -> None:
        raise ValueError("hello.kv_heads is 2; the resident model has 3")

    source = watch(check)
    assert source.last().reason == "was refused: hello.kv_heads is 2; the resident model has 3"


@pytest.mark.parametrize(
    ("settings", "word"), [({"python": "/no/such/python"}, "No such file"), ({"extra": {"at": "x"}}, "closed its end")]
)
def test_a_source_that_cannot_start_is_absent_with_a_reason_and_tried_again(
    watch: Callable[..., Watched], settings: dict[str, Any], word: str
) -> None:
    source = watch(**settings)
    assert word in source.last().reason
    assert source.until(lambda status: status.restarts > 1)


def test_an_error_of_the_device_is_that_prompts_own(watch: Callable[..., Watched]) -> None:
    source = watch(extra={"at": "1", "fault": "error"})
    pid = source.ready().pid
    source.keeper.send(prefill_of(1, PROMPT))
    failed = source.last().frame
    assert isinstance(failed, Failed)
    assert failed.refusal is Refusal.COMPUTE
    assert source.keeper.status.pid == pid


def test_a_source_that_did_what_none_may_is_ended_on_request(watch: Callable[..., Watched]) -> None:
    source = watch()
    source.keeper.send(prefill_of(1, PROMPT))
    assert isinstance(source.next().frame, Memory)
    source.keeper.kill("sent a span of a request that there never was")
    assert source.last().reason == "sent a span of a request that there never was"


def test_nothing_counts_that_comes_after_what_no_source_may_do(watch: Callable[..., Watched]) -> None:
    source = watch()
    source.ready()
    source.keeper.send(prefill_of(1, PROMPT))
    while not any(isinstance(arrival.frame, Done) for arrival in list(source.keeper._arrivals)):
        source._news.get(timeout=WAIT_S)
    assert isinstance(source.next().frame, Memory)
    source.keeper.kill("sent a span of a request that there never was")
    ended = source.next()
    assert (ended.frame, ended.reason) == (None, "sent a span of a request that there never was")
    source.ready()
    source.keeper.send(prefill_of(2, PROMPT))
    assert isinstance(source.last().frame, Done), "of the next life everything counts"


@pytest.mark.parametrize(
    ("packet", "word"),
    [
        (pack(Done(2, 3, 0, 1, 50, 0))[:-1], "no frame"),
        (b"\0" * (FRAME_MAX + 1), "packet of more than"),
        (HEADER.pack(MAGIC, VERSION, 77, 0, 0), "kind is 77"),
        (b"\xff" * 100, "header"),
        (pack(Release(1, 3)), "which only an owner does"),
        (pack(hello_of(FACTS)), "announced itself twice"),
        (b"", "closed its end"),
    ],
)
def test_what_is_no_frame_of_a_source_ends_its_life(packet: bytes, word: str) -> None:
    link, other = Link.pair()
    outbox = Outbox()
    arrived: list[Arrival] = []
    life = Life(SourceSettings(), 1, link, outbox, lambda _facts: None, arrived.append)
    good = pack(Done(2, 3, 0, 1, 50, 0))
    for data in (pack(hello_of(FACTS)), good, packet):
        other.send(data)
    with pytest.raises(SourceEndedError, match=word):
        life.run(lambda: False)
    assert [item.frame for item in arrived] == [parse(good)]
    for end in (link, other, outbox):
        end.close()


PARENT = """
import os, sys, threading
from pathlib import Path
from rowlock.daemon.prefill.keeper import SourceKeeper
from rowlock.daemon.prefill.protocol.hello import hello_of
from rowlock.daemon.prefill.protocol.link import Link, Received
from rowlock.daemon.prefill.settings import SourceSettings
ready = threading.Event()
settings = SourceSettings(factory="support.prefill:create")
keeper = SourceKeeper(settings, Path("/tmp"), lambda facts: ready.set(), lambda: None, lambda *a, **k: None)
keeper.start()
ready.wait()
print(keeper.status.pid, flush=True)
sys.stdin.read()
"""


def test_a_source_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        descriptor = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        parent.wait()
    with closing_fd(descriptor):
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(WAIT_S * 1000), "the source is still there"
