"""Eight clients stream from the real daemon while it moves to and fro: every answer is one identity's, token by token.

`make load` runs 200 transitions on the tiny model and five on the real one; `make test` twelve on the tiny one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.daemons import begin, owner, states, transition

from rowlock.cli.daemon_process import DaemonProcess
from rowlock.daemon.owner.scheduler import ACTIVE_MAX, WAITING_MAX
from rowlock.v1 import inference_pb2, owner_pb2

CLIENTS = 8
ANSWER_S = 240.0
STALLED_TOKENS = 1900
"""Of answers that shall outlast a crowd of calls, on a quick machine too."""
RSS_GROWTH_MAX = 24 * 1024 * 1024
"""Between the 20th and the 200th transition. Leaking one image of the tiny model each time would be twice as much."""

PROMPTS = [f"client {number} says: " for number in range(CLIENTS)]
References = dict[tuple[str, str], list[int]]
"""Tokens by (prompt, identity)."""


@dataclass(frozen=True)
class Answered:
    prompt: str
    identities: frozenset[str]
    tokens: list[int]
    complete: bool


@dataclass
class Load:
    """Clients that ask again and again until they are told to stop."""

    daemon: DaemonProcess
    tokens: int
    begun: int = 0
    answers: list[Answered] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        self._threads = [threading.Thread(target=self._client, args=[prompt]) for prompt in PROMPTS]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop.set()
        for thread in self._threads:
            thread.join()

    def _client(self, prompt: str) -> None:
        while not self.stop.is_set():
            self.begun += 1
            try:
                self.answers.append(ask(self.daemon, prompt, self.tokens))
            except grpc.RpcError as error:
                self.errors.append(error)


def ask(daemon: DaemonProcess, prompt: str, tokens: int) -> Answered:
    request = inference_pb2.GenerateRequest(prompt=prompt, max_tokens=tokens, ignore_eos=True)
    messages = list(daemon.client.inference.Generate(request, timeout=ANSWER_S))
    return Answered(
        prompt,
        frozenset(message.identity.digest for message in messages),
        [token for message in messages for token in message.tokens],
        messages[-1].finish_reason == inference_pb2.FINISH_REASON_LENGTH,
    )


def references(daemon: DaemonProcess, targets: tuple[Path, Path], tokens: int) -> References:
    """What each identity answers when nothing else goes on. The second target is resident afterwards."""
    found: References = {}
    for target in targets:
        transition(daemon, target=str(target))
        for prompt in PROMPTS:
            answered = ask(daemon, prompt, tokens)
            found[prompt, owner(daemon).identity.digest] = answered.tokens
    for prompt in PROMPTS:
        assert len({tuple(answer) for (asked, _), answer in found.items() if asked == prompt}) == 2, "they differ"
    return found


def move_under_load(
    daemon: DaemonProcess, targets: tuple[Path, Path], transitions: int, tokens: int
) -> Iterator[tuple[int, owner_pb2.TransitionRecord]]:
    """Transitions to and fro, every tenth a reload, under load; then every answer is looked at."""
    expected = references(daemon, targets, tokens)
    with Load(daemon, tokens) as load:
        for number in range(1, transitions + 1):
            require = owner_pb2.REQUIRE_B1 if number % 10 == 0 else owner_pb2.REQUIRE_B2
            events = transition(daemon, target=str(targets[(number + 1) % 2]), require=require)
            assert states(events)[-1] == "PUBLISHED"
            yield number, events[-1].record
    assert load.errors == [], "none is lost"
    assert len(load.answers) == load.begun, "none is stuck"
    assert len(load.answers) >= transitions
    for answered in load.answers:
        (identity,) = answered.identities
        assert answered.complete
        assert answered.tokens == expected[answered.prompt, identity], "none is mixed"
    assert len({identity for answered in load.answers for identity in answered.identities}) == 2


def test_twelve_transitions_under_load(tiny: Path, target: Path, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(tiny), "--threads", "1"]) as daemon:
        records = [record for _, record in move_under_load(daemon, (tiny, target), 12, 24)]
        assert {record.level for record in records} == {owner_pb2.LEVEL_B2, owner_pb2.LEVEL_B1}
        assert owner(daemon).requests_active == 0


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_two_hundred_transitions_under_load_in_flat_memory(tiny: Path, target: Path, tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(tiny), "--threads", "1"]) as daemon:
        process, resident_set = psutil.Process(daemon.process.pid), {}
        for number, _ in move_under_load(daemon, (tiny, target), 200, 24):
            if number % 20 == 0:
                resident_set[number] = process.memory_info().rss
        print("resident set in MiB by transition:", {key: value >> 20 for key, value in resident_set.items()})
        assert max(resident_set.values()) - resident_set[20] < RSS_GROWTH_MAX
        verified = daemon.client.call(daemon.client.owner.Verify, owner_pb2.VerifyRequest())
        assert verified.ok


@pytest.mark.campaign
@pytest.mark.timeout(1800)
def test_five_transitions_of_the_real_model_under_load(real_model: Path, tmp_path: Path) -> None:
    target = change_rows(real_model, tmp_path / "target", EMBED, list(range(0, 49152, 3)), negate)
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(real_model), "--threads", "2"]) as daemon:
        for _number, record in move_under_load(daemon, (real_model, target), 5, 12):
            print(f"drain {record.drain_ms:.0f} ms, exclusive {record.exclusive_ms:.1f} ms")
        assert daemon.client.call(daemon.client.owner.Verify, owner_pb2.VerifyRequest()).ok


def test_stalled_readers_and_a_full_queue_do_not_hold_up_a_drain(tiny: Path, target: Path, tmp_path: Path) -> None:
    """The lease ends when the last token is computed, not when somebody has read it."""
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(tiny), "--threads", "1"]) as daemon:
        expected = references(daemon, (target, tiny), STALLED_TOKENS)
        old = owner(daemon).identity.digest
        request = inference_pb2.GenerateRequest(prompt=PROMPTS[0], max_tokens=STALLED_TOKENS, ignore_eos=True)
        stalled = [daemon.client.inference.Generate(request, timeout=ANSWER_S) for _ in range(ACTIVE_MAX)]
        firsts = [next(iter(call)) for call in stalled]  # and nobody reads on
        short = inference_pb2.GenerateRequest(prompt=PROMPTS[1], max_tokens=2, ignore_eos=True)
        crowd = [daemon.client.inference.Generate(short, timeout=ANSWER_S) for _ in range(WAITING_MAX + 40)]
        codes, waiting = [], []
        moved = begin(daemon, target=str(target))
        assert states(moved.result(ANSWER_S))[-1] == "PUBLISHED"
        new = owner(daemon).identity.digest
        for call in crowd:
            try:
                messages = list(call)
            except grpc.RpcError as error:
                codes.append(error.code())
            else:
                (identity,) = {message.identity.digest for message in messages}
                tokens = [token for message in messages for token in message.tokens]
                assert tokens == expected[PROMPTS[1], identity][:2]
                waiting.append(identity)
        assert set(codes) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert len(waiting) + len(codes) == len(crowd)
        assert new in waiting
        for first, call in zip(firsts, stalled, strict=True):
            messages = [first, *call]
            assert {message.identity.digest for message in messages} == {old}
            assert [token for message in messages for token in message.tokens] == expected[PROMPTS[0], old]


@pytest.fixture
def target(tiny: Path, tmp_path: Path) -> Path:
    return change_rows(tiny, tmp_path / "target", EMBED, list(range(256)), negate)
