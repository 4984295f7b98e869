"""Remote prefill is local prefill, bit by bit: K/V, last logits, and the tokens that follow."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.checkpoints import write_tiny
from support.remote import Pair, in_order, pair_of, reversed_order, shuffled

from rowlock.daemon.prefill.protocol.frames import Mode

PAGE = 32
TOKENS = 32
CONTEXT = 768
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 511, 512, 513)
ORDERS = {"in order": in_order, "reversed": reversed_order, "shuffled": shuffled(7)}
FAMILIES = ("llama", "qwen3", "gemma3")
LAYERS = {"llama": 4, "qwen3": 2, "gemma3": 3}


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """The same for the same length and seed; shorter ones begin longer ones."""
    tokens = random.Random(seed)
    return tuple(tokens.randrange(256) for _ in range(length))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    with ExitStack() as open_pairs:
        base = tmp_path_factory.mktemp("exact")
        yield {
            family: open_pairs.enter_context(
                pair_of(write_tiny(base / family, family=family, num_hidden_layers=LAYERS[family]))
            )
            for family in FAMILIES
        }


def forget(pair: Pair) -> None:
    """Nothing that was computed before is found again."""
    pair.cache.forget_prefixes()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_and_streamed_prompts_equal_local_ones(pairs: dict[str, Pair], family: str, length: int) -> None:
    pair, prompt, layers = pairs[family], prompt_of(length), LAYERS[family]
    forget(pair)
    local = pair.local(prompt, TOKENS)
    for mode, span, chunk, order in (
        (Mode.WHOLE, 1, 0, "in order"),
        (Mode.STREAM, 1, PAGE, "shuffled"),
        (Mode.STREAM, 3, 37, "reversed"),
        (Mode.STREAM, layers, 0, "in order"),
        (Mode.DEFERRED, 2, 100, "shuffled"),
    ):
        forget(pair)
        assert pair.remote(prompt, TOKENS, mode, span, chunk, ORDERS[order]).differs(local) == "", (mode, span, chunk)


@pytest.mark.campaign
@pytest.mark.parametrize("length", [*LENGTHS, 700])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_cut_a_prompt_gives_the_same(pairs: dict[str, Pair], family: str, length: int) -> None:
    pair, prompt = pairs[family], prompt_of(length)
    forget(pair)
    local = pair.local(prompt, TOKENS)
    for layers in (1, 3, LAYERS[family]):
        for chunk in (PAGE, 37, 0):
            for name, order in ORDERS.items():
                forget(pair)
                found = pair.remote(prompt, TOKENS, Mode.STREAM, layers, chunk, order)
                assert found.differs(local) == "", f"{layers} layers, {chunk} tokens, {name}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("known", [0, 2 * PAGE, 4 * PAGE])
def test_what_is_known_of_a_prompt_is_not_imported_again(pairs: dict[str, Pair], family: str, known: int) -> None:
    """None of it, half, and as much as can be: the last token is always computed, for its logits."""
    pair, prompt = pairs[family], prompt_of(4 * PAGE + 1)
    forget(pair)
    local = pair.local(prompt, TOKENS)
    forget(pair)
    if known:
        pair.local((*prompt[:known], 7, 7, 7), 1)
    hits = pair.cache.hit_tokens
    assert pair.remote(prompt, TOKENS, Mode.STREAM).differs(local) == ""
    assert pair.cache.hit_tokens == hits + known


def test_one_page_as_long_as_the_context_is_a_page_like_any_other(tmp_path: Path) -> None:
    checkpoint = write_tiny(tmp_path / "model", max_position_embeddings=CONTEXT)
    with pair_of(checkpoint, CONTEXT, (CONTEXT,)) as whole, pair_of(checkpoint, PAGE, (CONTEXT,)) as paged:
        prompt = prompt_of(600)
        expected = paged.local(prompt, TOKENS)
        assert whole.local(prompt, TOKENS).differs(expected) == ""
        assert whole.remote(prompt, TOKENS, Mode.STREAM, 1, 100).differs(expected) == ""


@pytest.mark.parametrize("extra", [{"pad": "1"}, {"partitions": "2"}, {"partitions": "3", "pad": "1"}])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padding_and_partitions_change_nothing(tmp_path: Path, family: str, extra: dict[str, str]) -> None:
    checkpoint = write_tiny(tmp_path / "model", family=family, num_hidden_layers=3)
    with pair_of(checkpoint, widths=(64, 512), **extra) as pair:
        for length in (63, 64, 65):
            forget(pair)
            local = pair.local(prompt_of(length), TOKENS)
            forget(pair)
            assert pair.remote(prompt_of(length), TOKENS, Mode.STREAM, 2, 40).differs(local) == ""


@pytest.mark.parametrize("length", [33, 512])
def test_the_real_model_too(real_model: Path, length: int) -> None:
    with pair_of(real_model) as pair:
        prompt = real_prompt(length)
        local = pair.local(prompt, TOKENS)
        forget(pair)
        assert pair.remote(prompt, TOKENS, Mode.WHOLE).differs(local) == ""
        forget(pair)
        assert pair.remote(prompt, TOKENS, Mode.STREAM, 3, 100, ORDERS["shuffled"]).differs(local) == ""


@pytest.fixture(scope="module", params=["real_model", "gemma"])
def real_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request.getfixturevalue(request.param)) as pair:
        yield pair


def real_prompt(length: int) -> tuple[int, ...]:
    return tuple(token * 31 + 17 for token in prompt_of(length))


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("length", [*LENGTHS, 2048])
def test_real_models_at_every_length(real_pair: Pair, length: int) -> None:
    prompt, layers = real_prompt(length), real_pair.geometry.layers
    forget(real_pair)
    local = real_pair.local(prompt, TOKENS)
    for mode, span, chunk, order in (
        (Mode.WHOLE, 1, 0, "in order"),
        (Mode.STREAM, 1, PAGE, "shuffled"),
        (Mode.STREAM, 3, 37, "reversed"),
        (Mode.STREAM, layers, 0, "in order"),
    ):
        forget(real_pair)
        found = real_pair.remote(prompt, TOKENS, mode, span, chunk, ORDERS[order])
        assert found.differs(local) == "", (mode, span, chunk)


@pytest.mark.campaign
@pytest.mark.parametrize("known", [256, 512])
def test_what_is_known_of_a_prompt_of_a_real_model(real_pair: Pair, known: int) -> None:
    """Half of it, and as much as can be."""
    prompt = real_prompt(513)
    forget(real_pair)
    local = real_pair.local(prompt, TOKENS)
    forget(real_pair)
    real_pair.local((*prompt[:known], *[7] * (515 - known)), 1)  # of a length all of whose beginning is settled
    hits = real_pair.cache.hit_tokens
    assert real_pair.remote(prompt, TOKENS, Mode.STREAM, 3).differs(local) == ""
    assert real_pair.cache.hit_tokens == hits + known
