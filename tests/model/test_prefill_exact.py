"""Remote prefill is local prefill, bit by bit: K/V, last logits, and the tokens that follow."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
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


Way = tuple[Mode, int, int, str]
"""Layers of a span, tokens of a chunk, and the order of the spans."""


def ways(layers: int) -> list[Way]:
    """Of a model of so many layers."""
    return [
        (Mode.WHOLE, 1, 0, "in order"),
        (Mode.STREAM, 1, PAGE, "shuffled"),
        (Mode.STREAM, 3, 37, "reversed"),
        (Mode.STREAM, layers, 0, "in order"),
    ]


def check_ways(pair: Pair, prompt: tuple[int, ...], some: Iterable[Way]) -> None:
    """Each gives what the runtime computes itself."""
    forget(pair)
    local = pair.local(prompt, TOKENS)
    for mode, span, chunk, order in some:
        forget(pair)
        found = pair.remote(prompt, TOKENS, mode, span, chunk, ORDERS[order])
        assert found.differs(local) == "", f"{mode}, {span} layers, {chunk} tokens, {order}"


def check_known(pair: Pair, prompt: tuple[int, ...], known: int, other: int, layers: int = 1) -> None:
    """So many tokens are known from a prompt with ``other`` tokens of its own behind them: the rest is imported."""
    forget(pair)
    local = pair.local(prompt, TOKENS)
    forget(pair)
    if known:
        pair.local((*prompt[:known], *[7] * other), 1)
    hits = pair.cache.hit_tokens
    assert pair.remote(prompt, TOKENS, Mode.STREAM, layers).differs(local) == ""
    assert pair.cache.hit_tokens == hits + known


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_and_streamed_prompts_equal_local_ones(pairs: dict[str, Pair], family: str, length: int) -> None:
    some = [*ways(LAYERS[family]), (Mode.DEFERRED, 2, 100, "shuffled")]
    check_ways(pairs[family], prompt_of(length), some)


@pytest.mark.campaign
@pytest.mark.parametrize("length", [*LENGTHS, 700])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_cut_a_prompt_gives_the_same(pairs: dict[str, Pair], family: str, length: int) -> None:
    cuts = itertools.product((1, 3, LAYERS[family]), (PAGE, 37, 0), ORDERS)
    check_ways(pairs[family], prompt_of(length), [(Mode.STREAM, *cut) for cut in cuts])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("known", [0, 2 * PAGE, 4 * PAGE])
def test_what_is_known_of_a_prompt_is_not_imported_again(pairs: dict[str, Pair], family: str, known: int) -> None:
    """None of it, half, and as much as can be: the last token is always computed, for its logits."""
    check_known(pairs[family], prompt_of(4 * PAGE + 1), known, other=3)


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
            check_ways(pair, prompt_of(length), [(Mode.STREAM, 2, 40, "in order")])


@pytest.mark.parametrize("length", [33, 512])
def test_the_real_model_too(real_model: Path, length: int) -> None:
    with pair_of(real_model) as pair:
        some = [(Mode.WHOLE, 1, 0, "in order"), (Mode.STREAM, 3, 100, "shuffled")]
        check_ways(pair, real_prompt(length), some)


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
    check_ways(real_pair, real_prompt(length), ways(real_pair.geometry.layers))


@pytest.mark.campaign
@pytest.mark.parametrize("known", [256, 512])
def test_what_is_known_of_a_prompt_of_a_real_model(real_pair: Pair, known: int) -> None:
    """Half of it, and as much as can be."""
    # the other prompt is of a length all of whose beginning is settled
    check_known(real_pair, real_prompt(513), known, other=515 - known, layers=3)
