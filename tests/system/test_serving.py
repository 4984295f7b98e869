"""Requests that share steps and pages get what they would get alone; who runs short of pages loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows, negate, write_tiny
from support.owners import Answer, OwnerHarness, running_owner

from rowlock.bindings.device import Sampling, Variant
from rowlock.bindings.model.cache.geometry import CacheLimits
from rowlock.bindings.plan import Require
from rowlock.daemon.owner.states import OwnerState, TransitionState
from rowlock.v1.errors import OwnerError, Reason

TOKEN_BYTES = 2 * 2 * 2 * 16 * 2
"""K/V of one position in both layers of the tiny model."""
PROMPTS = ["tell me more", "what is this", "who goes there", "once upon a time"]
LONG = "a page has thirty-two tokens, and this text is longer than two of them are together."


def pages(count: int, page_tokens: int = 32) -> CacheLimits:
    return CacheLimits(count * page_tokens * TOKEN_BYTES, page_tokens)


@pytest.fixture
def tight(tmp_path: Path, tiny: Path) -> Iterator[OwnerHarness]:
    """Ten pages: less than half of what three of the requests here grow to."""
    with running_owner(tmp_path / "state", tiny, cache=pages(10)) as harness:
        yield harness


def alone(owner: OwnerHarness, prompts: list[str], max_tokens: int, **options: object) -> list[list[int]]:
    return [owner.ask(prompt, max_tokens, **options).wait() for prompt in prompts]


def served(owner: OwnerHarness) -> dict[str, int]:
    """After the owner thread has come to rest."""
    owner.verify()
    return dict(vars(owner.owner.view.served))


def in_use(owner: OwnerHarness) -> list[int]:
    owner.verify()
    return [group.in_use for group in owner.owner.view.cache.groups]


def test_four_greedy_requests_share_their_steps(owner: OwnerHarness) -> None:
    expected = alone(owner, PROMPTS, 64)
    before = served(owner)
    answers = [owner.ask(prompt, 64) for prompt in PROMPTS]
    assert [answer.wait() for answer in answers] == expected
    after = served(owner)
    assert after["steps"] - before["steps"] < 90
    assert after["tokens"] - before["tokens"] == 4 * 64
    assert in_use(owner) == [0]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.5, top_k=50, top_p=0.9, seed=7)])
@pytest.mark.parametrize("page_tokens", [4, 32])
def test_who_gives_pages_up_gets_the_same_tokens(
    tmp_path: Path, tiny: Path, sampling: Sampling, page_tokens: int
) -> None:
    with running_owner(tmp_path / "roomy", tiny) as roomy:
        expected = alone(roomy, PROMPTS, 200, sampling=sampling)
        assert served(roomy)["preemptions"] == 0
    with running_owner(tmp_path / "state", tiny, cache=pages(320 // page_tokens, page_tokens)) as tight:
        answers = [tight.ask(prompt, 200, sampling=sampling) for prompt in PROMPTS]
        assert [answer.wait() for answer in answers] == expected
        assert served(tight)["preemptions"] > 0
        assert served(tight)["tokens"] == 4 * 200
        assert in_use(tight) == [0]


def test_windows_too(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "gemma", family="gemma3")
    with running_owner(tmp_path / "roomy", model) as roomy:
        expected = alone(roomy, PROMPTS, 120)
        windows = [group.window for group in roomy.owner.view.cache.groups]
        assert windows == [0, 16]
    with running_owner(tmp_path / "state", model, cache=CacheLimits(60_000, 4)) as tight:
        answers = [tight.ask(prompt, 120) for prompt in PROMPTS]
        assert [answer.wait() for answer in answers] == expected
        assert served(tight)["preemptions"] > 0
        assert in_use(tight) == [0, 0]


def test_one_page_as_long_as_the_context(tmp_path: Path, tiny: Path, owner: OwnerHarness) -> None:
    expected = alone(owner, PROMPTS, 30)
    with running_owner(tmp_path / "one", tiny, cache=CacheLimits(3 * 2048 * TOKEN_BYTES, 1 << 20)) as paged:
        assert paged.owner.view.cache.page_tokens == 2048
        answers = [paged.ask(prompt, 30) for prompt in PROMPTS]
        assert [answer.wait() for answer in answers] == expected


def test_what_can_never_fit_is_refused_with_numbers_and_the_next_request_works(tight: OwnerHarness) -> None:
    with pytest.raises(OwnerError, match="401 tokens need 13 pages of 32 tokens each, the cache has 10") as refused:
        tight.ask((1,) * 321, 80).wait()
    assert refused.value.reason is Reason.CACHE_EXCEEDED
    assert len(tight.tokens()) == 12
    assert in_use(tight) == [0]


def test_without_a_limit_an_answer_may_fill_the_pages(tight: OwnerHarness) -> None:
    assert len(tight.ask((1,) * 300, None).wait()) == 20


def test_a_drain_waits_for_those_that_gave_their_pages_up(tmp_path: Path, tiny: Path, tight: OwnerHarness) -> None:
    """They keep their lease, and go on while admission is closed."""
    expected = alone(tight, PROMPTS[:3], 200)
    before = served(tight)["preemptions"]
    old = tight.identity
    target = change_rows(tiny, tmp_path / "target", EMBED, [3, 70], negate)
    answers = [tight.ask(prompt, 200) for prompt in PROMPTS[:3]]
    for answer in answers:
        answer.wait_token()
    transition = tight.begin(target)  # three of 212 tokens each are admitted: 10 pages are not enough
    assert [answer.wait() for answer in answers] == expected
    assert [answer.identity for answer in answers] == [old] * 3
    assert tight.end_of(transition).state == TransitionState.PUBLISHED.value
    assert served(tight)["preemptions"] > before
    assert tight.identity != old


def test_while_admission_is_closed_only_those_go_on_who_were_let_in(tight: OwnerHarness) -> None:
    expected = alone(tight, PROMPTS[:3], 200)
    before = served(tight)["preemptions"]
    answers = [tight.ask(prompt, 200) for prompt in PROMPTS[:3]]
    for answer in answers:
        answer.wait_token()
    tight.core.scheduler.admitting = False
    late = tight.ask(PROMPTS[3], 5)
    assert [answer.wait() for answer in answers] == expected
    assert served(tight)["preemptions"] > before
    assert late.events.empty()
    tight.core.scheduler.admitting = True
    tight.verify()
    assert len(late.wait()) == 5


def test_a_request_given_up_while_it_waits_for_pages_is_gone_at_once(tight: OwnerHarness) -> None:
    answers = [tight.ask(prompt, 200) for prompt in PROMPTS]
    for answer in answers[:2]:
        answer.wait_token()
    requests = [item.request for item in tight.core.scheduler._leased]
    requests[-1].cancelled.set()
    finished = [_outcome(answer) for answer in answers]
    assert sum(isinstance(item, OwnerError) and item.reason is Reason.CANCELLED for item in finished) == 1
    assert sorted(len(item) for item in finished if isinstance(item, list)) == [200, 200, 200]
    assert in_use(tight) == [0]


def _outcome(answer: Answer) -> list[int] | Exception:
    try:
        return answer.wait()
    except OwnerError as error:
        return error


def hits(owner: OwnerHarness) -> int:
    owner.verify()
    return owner.owner.view.cache.hit_tokens


def test_a_known_beginning_is_found_and_changes_nothing(owner: OwnerHarness) -> None:
    first = owner.tokens(LONG)
    assert hits(owner) == 0
    assert owner.tokens(LONG) == first
    assert hits(owner) == 64
    assert owner.tokens(LONG + " and more") == owner.tokens(LONG + " and more")


def test_no_prefix_outlives_its_identity(tmp_path: Path, tiny: Path, owner: OwnerHarness) -> None:
    target = change_rows(tiny, tmp_path / "target", EMBED, [3, ord("t"), 70], negate)
    with running_owner(tmp_path / "reference", target) as reference:
        expected = reference.tokens(LONG)
    old = owner.tokens(LONG)
    owner.transition(target)
    assert owner.tokens(LONG) == expected
    assert hits(owner) == 0
    owner.rollback()
    assert owner.tokens(LONG) == old
    assert hits(owner) == 0


def test_no_prefix_outlives_a_write_that_was_undone(
    tmp_path: Path, tiny: Path, owner: OwnerHarness, fault_file: Path
) -> None:
    target = change_rows(tiny, tmp_path / "target", EMBED, [3, 70], negate)
    first = owner.tokens(LONG)
    fault_file.write_text(json.dumps({"operation": "write", "effect": "flip", "count": 1}))
    assert owner.transition(target).state == TransitionState.ROLLED_BACK.value
    assert owner.tokens(LONG) == first
    assert hits(owner) == 0
    assert owner.tokens(LONG) == first
    assert hits(owner) == 64


def test_the_first_token_may_be_the_last(owner: OwnerHarness) -> None:
    (token,) = owner.ask("hello", 1).wait()
    resident = owner.owner.view.resident
    assert resident is not None
    object.__setattr__(resident.text, "eos_tokens", (token,))
    answer = owner.ask("hello", 10, ignore_eos=False)
    assert answer.wait() == []
    assert answer.stopped
    assert in_use(owner) == [0]


VARIANTS = (Variant(1, 100), Variant(4, 20), Variant(8, 8))


def of_first_times(owner: OwnerHarness) -> dict[str, int]:
    """What is counted when something is made, loaded or compiled."""
    owner.verify()
    counters = vars(owner.owner.view.counters)
    return {name: counters[name] for name in ("compiles", "program_loads", "allocations", "workspaces")}


def test_after_a_warmup_nothing_is_made_at_a_first_request_and_nothing_is_left_of_it(
    tmp_path: Path, tiny: Path, owner: OwnerHarness
) -> None:
    prompts = {
        (variant, number): tuple((7 * number + at) % 250 for at in range(variant.length))
        for variant in VARIANTS
        for number in range(variant.batch)
    }
    expected = {key: owner.ask(prompt, 3).wait() for key, prompt in prompts.items()}
    with running_owner(tmp_path / "warm", tiny, variants=VARIANTS, warmup=True) as warm:
        assert set(served(warm).values()) == {0}
        (group,) = warm.owner.view.cache.groups
        assert (group.free, warm.owner.view.cache.hit_tokens) == (group.pages, 0)
        ready = of_first_times(warm)
        assert ready["workspaces"] > 0
        for variant in VARIANTS:
            answers = {key: warm.ask(prompts[key], 3) for key in prompts if key[0] == variant}
            assert {key: answer.wait() for key, answer in answers.items()} == {key: expected[key] for key in answers}
        assert of_first_times(warm) == ready
        # and after a reload, whose runtime is another one
        other = change_rows(tiny, tmp_path / "other", EMBED, [3], negate)
        assert warm.transition(other, Require.B1).state == TransitionState.PUBLISHED.value
        ready = of_first_times(warm)
        warm.ask(prompts[VARIANTS[0], 0], 3).wait()
        assert of_first_times(warm) == ready


def test_a_variant_that_does_not_fit_is_named(tmp_path: Path, tiny: Path) -> None:
    with running_owner(tmp_path / "state", tiny, cache=pages(10), variants=(Variant(8, 60),), warmup=True) as owner:
        assert owner.owner.view.state is OwnerState.EMPTY
        told = "serving.variants: batch 8, length 60: with up to 62 tokens each it needs 16 pages of 32 tokens"
        assert told in owner.owner.view.reason
        assert isinstance(owner.load_failure, OwnerError)
        assert owner.load_failure.reason is Reason.CACHE_EXCEEDED


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"num_hidden_layers": 4}, Reason.CACHE_EXCEEDED), ({"max_position_embeddings": 60}, Reason.CONTEXT_EXCEEDED)],
)
def test_a_reload_that_a_variant_does_not_fit_ends_before_the_drain(
    tmp_path: Path, tiny: Path, config: dict[str, int], reason: Reason
) -> None:
    """The resident model stays as it is, and goes on answering; nothing of it is closed and loaded again."""
    target = write_tiny(tmp_path / "target", **config)
    with running_owner(tmp_path / "state", tiny, cache=pages(12), variants=(Variant(4, 60),), warmup=True) as owner:
        runtime, first = owner.core.resident.runtime, owner.tokens()
        record = owner.transition(target, Require.B1)
        assert (record.state, record.reason) == (TransitionState.FAILED.value, reason.value)
        assert "serving.variants: batch 4, length 60: " in record.message
        assert "drain" not in record.phases
        assert owner.core.resident.runtime is runtime
        assert owner.tokens() == first


def test_the_largest_variant_that_fits_is_warmed_up(tmp_path: Path, tiny: Path) -> None:
    """What is refused beforehand, and what really runs, meet without a gap."""
    for batch in (5, 6):
        with running_owner(
            tmp_path / str(batch), tiny, cache=pages(10), variants=(Variant(batch, 62),), warmup=True
        ) as owner:
            assert (owner.owner.view.state is OwnerState.READY) == (batch == 5)


def test_a_variant_is_added_to_a_live_owner(owner: OwnerHarness) -> None:
    running, expected = owner.ask("go on", 60), owner.tokens("go on", 60)
    identity, before = owner.identity, of_first_times(owner)
    cost = owner.owner.prepare_variant(Variant(8, 100)).result(60)
    assert (cost.workspaces, cost.allocations, cost.bytes_written) == (1, 0, 0)
    assert running.wait() == expected
    after = of_first_times(owner)
    again = owner.owner.prepare_variant(Variant(8, 100)).result(60)
    assert again.workspaces == 0
    assert (after["allocations"], owner.identity) == (before["allocations"], identity)
    assert in_use(owner) == [0]
    with pytest.raises(OwnerError, match="batch 1, length 2047: with 2 new tokens it exceeds the context of 2048"):
        owner.owner.prepare_variant(Variant(1, 2047)).result(60)
