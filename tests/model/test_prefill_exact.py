"""Remote prefill is local prefill, bit by bit: K/V, last logits, and the tokens that follow."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.checkpoints import write_tiny
from support.remote import Pair, in_order, pair_of, reversed_order, shuffled

from rowlock.daemon.prefill.decoder_engine import create
from rowlock.daemon.prefill.engine import EngineOptions
from rowlock.daemon.prefill.protocol.frames import Mode

PAGE = 32
TOKENS = 32
CONTEXT = 768
LONGEST = 2048
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, 511, 512, 513)
ORDERS = {"in order": in_order, "reversed": reversed_order, "shuffled": shuffled(7)}
FAMILIES = ("llama", "qwen3", "gemma3")
LAYERS = 6
"""Of each small model: a span of three is not all of them."""
SLIDING = {"layer_types": [*["sliding_attention"] * 4, "full_attention", "sliding_attention"]}
"""Of Gemma: spans of several layers of one group, and spans that end where a group does."""


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """The same for the same length and seed; shorter ones begin longer ones."""
    tokens = random.Random(seed)
    return tuple(tokens.randrange(256) for _ in range(length))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Pair]]:
    with ExitStack() as open_pairs:
        base = tmp_path_factory.mktemp("exact")
        yield {family: open_pairs.enter_context(pair_of(small(base / family, family))) for family in FAMILIES}


def small(directory: Path, family: str, context: int = 2 * LONGEST) -> Path:
    """A small random model of a family."""
    more = SLIDING if family == "gemma3" else {}
    return write_tiny(directory, family=family, num_hidden_layers=LAYERS, max_position_embeddings=context, **more)


def forget(pair: Pair) -> None:
    """Nothing that was computed before is found again."""
    pair.cache.forget_prefixes()


Way = tuple[Mode, int, int, str]
"""Layers of a span, tokens of a chunk, and the order of the spans."""
WHOLE: Way = (Mode.WHOLE, 1, 0, "in order")


def ways(layers: int) -> list[Way]:
    """Of a model of so many layers."""
    return [
        WHOLE,
        (Mode.STREAM, 1, PAGE, "shuffled"),
        (Mode.STREAM, 3, 37, "reversed"),
        (Mode.STREAM, layers, 0, "in order"),
    ]


def every_way(layers: int) -> list[Way]:
    """Of a model of so many layers: spans of one, three and all; chunks of a page, odd ones and all; every order."""
    cuts = itertools.product((1, 3, layers), (PAGE, 37, 0), ORDERS)
    return [WHOLE, *((Mode.STREAM, *cut) for cut in cuts)]


def check_ways(pair: Pair, prompt: tuple[int, ...], some: Iterable[Way]) -> None:
    """Each gives what the runtime computes itself, from a source that computes, and from nothing that was kept."""
    assert "paced" not in pair.facts.name
    hits, asked = pair.cache.hit_tokens, pair.prompts_computed
    forget(pair)
    local = pair.local(prompt, TOKENS)
    for number, (mode, span, chunk, order) in enumerate(some, start=1):
        forget(pair)
        found = pair.remote(prompt, TOKENS, mode, span, chunk, ORDERS[order])
        assert found.differs(local) == "", f"{mode}, {span} layers, {chunk} tokens, {order}"
        assert pair.prompts_computed == asked + number, "the source has computed each of them"
    assert pair.cache.hit_tokens == hits, "nothing was found of the one before"


def check_known(pair: Pair, prompt: tuple[int, ...], known: int, other: int, layers: int = 1) -> None:
    """So many tokens are known from a prompt with ``other`` tokens of its own behind them: the rest is imported."""
    forget(pair)
    local = pair.local(prompt, TOKENS)
    for mode, span, chunk, order in (Mode.STREAM, layers, 0, "in order"), (Mode.STREAM, 1, 37, "shuffled"), WHOLE:
        forget(pair)
        if known:
            pair.local((*prompt[:known], *[7] * other), 1)
        hits = pair.cache.hit_tokens
        assert pair.remote(prompt, TOKENS, mode, span, chunk, ORDERS[order]).differs(local) == ""
        assert pair.cache.hit_tokens == hits + known


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_and_streamed_prompts_equal_local_ones(pairs: dict[str, Pair], family: str, length: int) -> None:
    some = [*ways(LAYERS), (Mode.DEFERRED, 2, 100, "shuffled")]
    check_ways(pairs[family], prompt_of(length), some)


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("length", [*LENGTHS, 700, LONGEST])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_way_to_cut_a_prompt_gives_the_same(pairs: dict[str, Pair], family: str, length: int) -> None:
    check_ways(pairs[family], prompt_of(length), every_way(LAYERS))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("known", [0, 2 * PAGE, 4 * PAGE])
def test_what_is_known_of_a_prompt_is_not_imported_again(pairs: dict[str, Pair], family: str, known: int) -> None:
    """None of it, half, and as much as can be: the last token is always computed, for its logits."""
    check_known(pairs[family], prompt_of(4 * PAGE + 1), known, other=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_prompt_that_is_known_in_full_the_last_page_is_imported(pairs: dict[str, Pair], family: str) -> None:
    """So no suffix is ever empty: without one there would be no logits."""
    check_known(pairs[family], prompt_of(4 * PAGE), 3 * PAGE, other=PAGE + 3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [2, 4])
def test_prompts_that_arrive_together_are_those_that_arrive_alone(
    pairs: dict[str, Pair], family: str, count: int
) -> None:
    """Their spans come in any order, each goes to its own request, and they become sequences in another order."""
    pair = pairs[family]
    prompts = [prompt_of(length, seed=length) for length in (70, 33, 100, 5)[:count]]
    forget(pair)
    local = [pair.local(prompt, TOKENS) for prompt in prompts]
    forget(pair)
    for found, expected in zip(pair.together(prompts, TOKENS, shuffled(count)), local, strict=True):
        assert found.differs(expected) == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_one_page_as_long_as_the_context_is_a_page_like_any_other(tmp_path: Path, family: str) -> None:
    checkpoint = small(tmp_path / "model", family, CONTEXT)
    with pair_of(checkpoint, CONTEXT, (CONTEXT,)) as whole, pair_of(checkpoint, PAGE, (CONTEXT,)) as paged:
        for length in (1, 31, 600):
            prompt = prompt_of(length)
            assert whole.local(prompt, TOKENS).differs(paged.local(prompt, TOKENS)) == ""
            check_ways(whole, prompt, [*ways(LAYERS), (Mode.STREAM, 1, 100, "reversed")])


@pytest.mark.parametrize(
    ("device", "extra"),
    [
        ("cpu", {"pad": "1"}),
        ("cpu", {"partitions": "2"}),
        ("cpu", {"partitions": "3", "pad": "1"}),
        pytest.param("cpu:0", {"partitions": "1"}, marks=pytest.mark.torch_bits),
        pytest.param("cpu:0,cpu:0", {"partitions": "2", "pad": "1"}, marks=pytest.mark.torch_bits),
        pytest.param("cpu,cpu:0", {"partitions": "3"}, marks=pytest.mark.torch_bits),
        pytest.param("cpu:0,cpu", {"partitions": "2"}, marks=pytest.mark.torch_bits),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_padding_and_partitions_change_nothing(tmp_path: Path, family: str, device: str, extra: dict[str, str]) -> None:
    """``cpu:0`` is a device beside the host, which is ``cpu``: that it is the same memory only the numbers tell."""
    checkpoint = write_tiny(tmp_path / "model", family=family, num_hidden_layers=3)
    with pair_of(checkpoint, widths=(64, 512), device=device, **extra) as pair:
        for length in (63, 64, 65):
            # torch's products, those of a device, have other bits for other numbers of tokens
            chunk = 0 if ":" in device else 40
            check_ways(pair, prompt_of(length), [(Mode.STREAM, 2, chunk, "in order")])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_device_has_the_weights_and_the_k_v_of_its_own_layers_only(tmp_path: Path, family: str) -> None:
    options = EngineOptions(small(tmp_path / "model", family), "cpu:0", widths=(64,), extra={"partitions": "2"})
    first, second = create(options)._parts
    assert [(part.first, part.stop) for part in (first, second)] == [(0, 3), (3, 6)]
    for part in (first, second):
        decoder = inspect.getclosurevars(part.forward).nonlocals["decoder"]
        assert {name.split(".")[0] for name in decoder._weights} == {"0", "1", "2"}
        assert sum(len(group.group.layers) for group in part.table.cache.groups) == 3


@pytest.mark.parametrize("length", [33, 512])
def test_the_real_model_too(real_model: Path, length: int) -> None:
    with pair_of(real_model) as pair:
        check_ways(pair, real_prompt(length), [WHOLE, (Mode.STREAM, 3, 100, "shuffled")])


@pytest.fixture(scope="module", params=["real_model", "gemma"])
def real_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with pair_of(request.getfixturevalue(request.param)) as pair:
        yield pair


def real_prompt(length: int) -> tuple[int, ...]:
    return tuple(token * 31 + 17 for token in prompt_of(length))


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("length", [*LENGTHS, LONGEST])
def test_real_models_at_every_length(real_pair: Pair, length: int) -> None:
    check_ways(real_pair, real_prompt(length), ways(real_pair.geometry.layers))


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("length", [PAGE + 1, 513])
def test_every_way_to_cut_a_prompt_of_a_real_model_gives_the_same(real_pair: Pair, length: int) -> None:
    check_ways(real_pair, real_prompt(length), every_way(real_pair.geometry.layers))


@pytest.mark.campaign
def test_prompts_of_a_real_model_that_arrive_together_are_those_that_arrive_alone(real_pair: Pair) -> None:
    prompts = [real_prompt(length) for length in (70, 33, 200, 5)]
    forget(real_pair)
    local = [real_pair.local(prompt, TOKENS) for prompt in prompts]
    forget(real_pair)
    for found, expected in zip(real_pair.together(prompts, TOKENS, shuffled(1)), local, strict=True):
        assert found.differs(expected) == ""


@pytest.mark.campaign
@pytest.mark.parametrize("known", [256, 512])
def test_what_is_known_of_a_prompt_of_a_real_model(real_pair: Pair, known: int) -> None:
    """Half of it, and as much as can be."""
    # the other prompt is of a length all of whose beginning is settled
    check_known(real_pair, real_prompt(513), known, other=515 - known, layers=3)
