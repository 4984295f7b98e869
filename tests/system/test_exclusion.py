"""No request is ever answered by two identities."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.owners import Answer, OwnerHarness

from rowlock.bindings.device import Sampling
from rowlock.bindings.plan import Require
from rowlock.daemon.owner.requests import GenerationRequest
from rowlock.daemon.owner.scheduler import WAITING_MAX
from rowlock.v1.errors import OwnerError, Reason


@pytest.fixture
def target(tiny: Path, tmp_path: Path) -> Path:
    return change_rows(tiny, tmp_path / "target", EMBED, list(range(256)), negate)


@pytest.mark.parametrize("require", [Require.B2, Require.B1])
def test_a_request_in_flight_ends_on_its_identity_and_new_ones_wait(
    owner: OwnerHarness, target: Path, require: Require
) -> None:
    old = owner.identity
    old_reference = owner.tokens("abc", 600)
    running = owner.ask("abc", 600)
    running.wait_token()
    transition = owner.begin(target, require)
    while owner.owner.journal.find(transition).state in {"PLANNED", "STAGED"}:  # type: ignore[union-attr]
        pass
    late = owner.ask("abc", 600)
    record = owner.end_of(transition)
    assert record.state == "PUBLISHED"
    assert running.wait() == old_reference
    assert running.identity == old
    new = owner.identity
    assert late.wait() == owner.tokens("abc", 600)
    assert late.identity == new != old
    assert late.tokens != old_reference
    assert record.drain_ms > 0


def test_every_answer_under_load_is_one_identitys(owner: OwnerHarness, tiny: Path, target: Path) -> None:
    references = {owner.identity.digest: owner.tokens("xyz", 40)}
    owner.transition(target)
    references[owner.identity.digest] = owner.tokens("xyz", 40)
    assert len({tuple(tokens) for tokens in references.values()}) == 2
    answers: list[Answer] = []
    stop = threading.Event()

    def client() -> None:
        while not stop.is_set():
            answer = owner.ask("xyz", 40)
            answer.wait()
            answers.append(answer)

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    for index in range(10):
        assert owner.transition((tiny, target)[index % 2]).state == "PUBLISHED"
    stop.set()
    for thread in clients:
        thread.join()
    assert len(answers) >= 8
    for answer in answers:
        assert answer.tokens == references[answer.identity.digest]
    assert {answer.identity.digest for answer in answers} == set(references)


def test_a_prompt_is_tokenised_under_the_assets_that_answer_it(owner: OwnerHarness) -> None:
    """Tokens made under other assets are not used."""
    expected = owner.tokens("hello")
    stale = owner.ask("hello", tokens=(1, 2, 3), assets="00" * 32)
    assert stale.wait() == expected
    fresh = owner.ask("hello", tokens=(1, 2, 3), assets=owner.identity.assets)
    assert fresh.wait() == owner.ask((1, 2, 3)).wait()


def test_a_client_that_gives_up_frees_its_place(owner: OwnerHarness) -> None:
    answer = Answer()
    request = GenerationRequest("r", "abc", 1900, Sampling(), True, answer)
    owner.owner.generate(request)
    answer.wait_token()
    request.cancelled.set()
    with pytest.raises(OwnerError) as caught:
        answer.wait()
    assert caught.value.reason is Reason.CANCELLED
    assert len(answer.tokens) < 1900
    owner.tokens()
    assert owner.core.scheduler.active == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "reason"),
    [("", 4, "ARGUMENT_INVALID"), ((1, 260), 4, "ARGUMENT_INVALID"), ("abc", 2046, "CONTEXT_EXCEEDED")],
)
def test_bad_requests_are_refused_and_the_next_works(
    owner: OwnerHarness, prompt: str | tuple[int, ...], max_tokens: int, reason: str
) -> None:
    with pytest.raises(OwnerError) as caught:
        owner.ask(prompt, max_tokens).wait()
    assert caught.value.reason == reason
    assert len(owner.ask("abc", 8).wait()) == 8


def test_the_queue_is_bounded(owner: OwnerHarness) -> None:
    owner.core.scheduler.admitting = False
    answers = [owner.ask("a", 1) for _ in range(WAITING_MAX + 1)]
    with pytest.raises(OwnerError) as caught:
        answers[-1].wait()
    assert caught.value.reason is Reason.QUEUE_FULL
    owner.core.scheduler.admitting = True
    owner.verify()  # any command wakes the thread
    assert all(len(answer.wait()) == 1 for answer in answers[:-1])


def test_end_of_sequence_stops_unless_ignored(owner: OwnerHarness) -> None:
    free = owner.ask("abc", 8).wait()
    owner.core.resident.text.eos_tokens = (free[3],)
    answer = owner.ask("abc", 8, ignore_eos=False)
    assert answer.wait() == free[: free.index(free[3])]
    assert answer.stopped
    assert owner.ask("abc", 8).wait() == free


def test_sampling_depends_on_the_seed_alone(owner: OwnerHarness) -> None:
    def sampled(seed: int) -> Answer:
        return owner.ask("abc", 30, sampling=Sampling(temperature=1.0, top_k=50, seed=seed))

    together = [sampled(1), sampled(2), sampled(1)]
    first, second, again = (answer.wait() for answer in together)
    assert first == again != second


def test_two_transitions_at_once_second_is_refused_first_unharmed(
    owner: OwnerHarness, target: Path, tiny: Path, tmp_path: Path
) -> None:
    other = change_rows(tiny, tmp_path / "other", EMBED, [3], negate)
    running = owner.ask("abc", 900)
    running.wait_token()
    first = owner.begin(target)
    with pytest.raises(OwnerError) as caught:
        owner.begin(other)
    assert caught.value.reason is Reason.TRANSITION_OPEN
    with pytest.raises(OwnerError):
        owner.verify()
    assert owner.end_of(first).state == "PUBLISHED"
    assert owner.transition(other).state == "PUBLISHED"
