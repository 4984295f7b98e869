"""Requests that meet in every way get, bit for bit, what each gets alone: a walk of random requests on each family.

Steps, pages and beginnings are shared, pages run short, clients hang up, and the model is exchanged meanwhile. Whatever
answers, it is the tokens that the identity of the lease gives to this request in an owner of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.checkpoints import EMBED, FAMILIES, K0, change_rows, negate, write_tiny
from support.owners import Answer, OwnerHarness, running_owner

from rowlock.bindings.device import CacheUse, Sampling
from rowlock.bindings.model.cache.geometry import CacheLimits
from rowlock.daemon.owner.requests import GenerationRequest, GivenUp
from rowlock.daemon.owner.states import TransitionState
from rowlock.v1.errors import OwnerError, Reason

POOL_TOKENS = 576
"""What all pages hold: enough for the longest request, and for few more beside it."""
PROMPT_MAX, NEW_MAX = 420, 140
PART = 8
"""Requests between two transitions."""
SEEDS = (1,)
MORE_SEEDS = tuple(range(2, 10))


@dataclass(frozen=True)
class Ask:
    """A request, and after how many tokens its client hangs up (0: never)."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    hang_up: int


@dataclass
class Client(Answer):
    """Hangs up, or lets the next one in, when it has heard enough."""

    ask: Ask = field(kw_only=True)
    cancelled: GivenUp = field(default_factory=GivenUp)

    def token(self, token: int) -> None:
        super().token(token)
        if len(self.tokens) == self.ask.hang_up:
            self.cancelled.set()

    def outcome(self) -> list[int]:
        """The tokens, after whatever end."""
        try:
            return self.wait()
        except OwnerError as error:
            if error.reason is not Reason.CANCELLED or not self.ask.hang_up:
                raise
            return self.tokens


def asks_of(source: random.Random, count: int) -> list[Ask]:
    """Prompts that begin alike, of lengths on both sides of borders of pages and blocks.

    The first four grow to more than all pages together hold.
    """
    streams = [[source.randrange(256) for _ in range(PROMPT_MAX)] for _ in range(3)]
    growing = [Ask(tuple(streams[0][:length]), NEW_MAX, sampling_of(source), 0) for length in (9, 33, 70, 100)]
    return growing + [_random_ask(source, streams) for _ in range(count - len(growing))]


def _random_ask(source: random.Random, streams: list[list[int]]) -> Ask:
    borders = (1, 2, 31, 32, 33, 64, 65, 97)
    length = source.choice((source.choice(borders), source.randrange(1, 200), source.randrange(200, PROMPT_MAX)))
    shared = source.choice((length, source.randrange(length + 1)))
    prompt = source.choice(streams)[:shared] + [source.randrange(256) for _ in range(length - shared)]
    new = source.choice((1, source.randrange(1, NEW_MAX)))
    hang_up = source.choice((0, 0, source.randrange(1, new + 1)))
    return Ask(tuple(prompt), new, sampling_of(source), hang_up)


def sampling_of(source: random.Random) -> Sampling:
    temperature, top_p, top_k = source.choice((0, 0.3, 1.0, 4.0)), source.choice((1.0, 0.8)), source.choice((0, 20))
    return Sampling(temperature, top_p, top_k, source.getrandbits(60))


def submit(owner: OwnerHarness, ask: Ask) -> Client:
    client = Client(ask=ask)
    owner.owner.generate(
        GenerationRequest("r", ask.prompt, ask.max_tokens, ask.sampling, True, client, cancelled=client.cancelled)
    )
    return client


def alone(state: Path, checkpoint: Path, asks: list[Ask]) -> tuple[str, list[list[int]]]:
    """The digest of an identity, and what it gives to each: one after the other, nothing found again."""
    answers = []
    with running_owner(state, checkpoint) as owner:
        for ask in asks:
            owner.core.resident.runtime.forget()
            answers.append(owner.ask(ask.prompt, ask.max_tokens, sampling=ask.sampling).wait())
        assert cache(owner).hit_tokens == 0
        return owner.identity.digest, answers


def cache(owner: OwnerHarness) -> CacheUse:
    """After the owner thread has come to rest."""
    owner.verify()
    return owner.owner.view.cache


@contextmanager
def tight_owner(state: Path, checkpoint: Path, page_tokens: int) -> Iterator[OwnerHarness]:
    """Pages for some of the requests only."""
    with running_owner(state / "measured", checkpoint, cache=CacheLimits(0, page_tokens)) as roomy:
        use = cache(roomy)
    token_bytes = use.nbytes // sum(group.layers * group.pages for group in use.groups) // page_tokens
    layers = sum(group.layers for group in use.groups)
    limits = CacheLimits(POOL_TOKENS * layers * token_bytes, page_tokens)
    with running_owner(state / "tight", checkpoint, cache=limits) as owner:
        yield owner


def walk(directory: Path, family: str, seed: int, parts: int) -> None:
    source = random.Random(f"{family} {seed}")
    print(f"again: python -m pytest -m 'campaign or not campaign' tests/system/test_exactness.py -k {family}-{seed}")
    asks, page_tokens = asks_of(source, parts * PART), source.choice((4, 16, 32))
    first = write_tiny(directory / "first", family=family)
    second = change_rows(first, directory / "second", EMBED, [3, 70, 200], negate)
    models = [first, second, change_rows(second, directory / "third", K0, [1, 5], negate)]
    expected = dict(alone(directory / f"alone-{at}", model, asks) for at, model in enumerate(models[:parts]))
    with tight_owner(directory, first, page_tokens) as owner:
        clients: list[Client] = []
        for part in range(parts):
            if part:
                record = owner.transition(models[part % len(models)])
                assert record.state == TransitionState.PUBLISHED
            clients += [submit(owner, ask) for ask in asks[PART * part : PART * part + PART]]
        compare(asks, clients, expected)
        use = cache(owner)
        assert all(group.in_use == 0 for group in use.groups)
        assert owner.owner.view.served.preemptions > 0
        assert use.hit_tokens > 0
        assert len({client.identity.digest for client in clients}) == len(expected)


def compare(asks: list[Ask], clients: list[Client], expected: dict[str, list[list[int]]]) -> None:
    """Every answer against the one of its identity; who hung up has the beginning of it."""
    for at, (ask, client) in enumerate(zip(asks, clients, strict=True)):
        tokens, wanted = client.outcome(), expected[client.identity.digest][at]
        assert tokens == wanted[: len(tokens)], f"request {at} under {client.identity.digest[:12]}"
        assert len(tokens) == len(wanted) or len(tokens) >= ask.hang_up > 0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_meeting_changes_nothing(tmp_path: Path, family: str, seed: int) -> None:
    walk(tmp_path, family, seed, parts=2)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", MORE_SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_meeting_changes_nothing_at_length(tmp_path: Path, family: str, seed: int) -> None:
    walk(tmp_path, family, seed, parts=7)
