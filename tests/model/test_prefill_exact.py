"""Remote prefill is local prefill, bit by bit: K/V, last logits, and the tokens that follow."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from support.checkpoints import write_tiny
from support.remote import Pair, in_order, pair_of, reversed_order, shuffled

from rowlock.daemon.prefill.protocol.frames import Mode

PAGE = 32
TOKENS = 32
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 511, 512, 513)
ORDERS = {"in order": in_order, "reversed": reversed_order, "shuffled": shuffled(7)}


def prompt_of(length: int, seed: int = 0, vocab: int = 256) -> tuple[int, ...]:
    random_tokens = random.Random(length * 1000 + seed)
    return tuple(random_tokens.randrange(vocab) for _ in range(length))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(write_tiny(tmp_path_factory.mktemp("exact") / "base", num_hidden_layers=4)) as both:
        yield both


def forget(pair: Pair) -> None:
    """Nothing that was computed before is found again."""
    pair.cache.forget_prefixes()


@pytest.mark.parametrize("length", LENGTHS)
def test_whole_and_streamed_prompts_equal_local_ones(pair: Pair, length: int) -> None:
    prompt = prompt_of(length)
    forget(pair)
    local = pair.local(prompt, TOKENS)
    forget(pair)
    assert pair.remote(prompt, TOKENS, Mode.WHOLE).differs(local) == ""
    for layers in (1, 3, 4):
        for chunk in (PAGE, 37, 0):
            for name, order in ORDERS.items():
                forget(pair)
                found = pair.remote(prompt, 1, Mode.STREAM, layers, chunk, order)
                found.tokens += local.tokens[1:]
                assert found.differs(local) == "", f"{layers} layers, {chunk} tokens, {name}"
    forget(pair)
    assert pair.remote(prompt, TOKENS, Mode.STREAM, 3, 37, ORDERS["shuffled"]).differs(local) == ""
