"""The compiled decoder: the bits of the one in torch, whatever else is in the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from support.checkpoints import GEMMA3, QWEN3, TINY
from support.kernels import kernels_or_skip

from rowlock.bindings.cpu.decode import NativeDecoder, settled_tokens, supported
from rowlock.bindings.cpu.kernel_library import AttentionRows, Kernels, PagedRows
from rowlock.bindings.device import Counters
from rowlock.bindings.model.cache.table import BlockTable, table_for_one
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.decoder import Decoder, Span
from rowlock.bindings.model.layout import build_layout

SHAPES: dict[str, dict[str, Any]] = {
    "grouped heads": {
        **TINY, "vocab_size": 300, "hidden_size": 96, "intermediate_size": 136, "num_hidden_layers": 3,
        "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 16,
    },
    "wide heads, own head": {
        **TINY, "hidden_size": 72, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 128,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
    "qwen3": QWEN3,
    "gemma3": GEMMA3,
    "gemma3, groups": {
        **GEMMA3, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "num_key_value_heads": 2, "head_dim": 256, "sliding_window": 200,
    },
}  # fmt: skip

pytestmark = pytest.mark.torch_bits


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """torch adds in another order when its threads share one product."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    library = kernels_or_skip()
    return Kernels(library, 2)


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def pair(request: pytest.FixtureRequest, kernels: Kernels) -> tuple[Decoder, NativeDecoder]:
    """A decoder over random weights, and the compiled one over the same."""
    config = parse_config(Path(), request.param)
    source = torch.Generator().manual_seed(0)
    weights = {
        name: (torch.randn(parent.rows, parent.row_bytes // 2, generator=source) * (1 if parent.rows == 1 else 0.2)).to(
            torch.bfloat16
        )
        for name, parent in build_layout(config, "BF16").parents.items()
    }
    decoder = Decoder(config, weights)
    assert supported(config)
    return decoder, NativeDecoder(decoder, weights, kernels, Counters())


def new_table(decoder: Decoder, capacity: int, page_tokens: int = 4) -> BlockTable:
    """With pages that lie anywhere."""
    table = table_for_one(decoder.config, capacity, decoder.dtype, decoder.device, page_tokens)
    for pages in table.pages:
        random.Random(capacity).shuffle(pages)
    return table


def filled(decoder: Decoder, tokens: list[int], page_tokens: int = 4) -> BlockTable:
    table = new_table(decoder, len(tokens) + 40, page_tokens)
    if tokens:
        decoder.forward([Span(torch.tensor(tokens), table)])
    return table


def one(token: int, table: BlockTable) -> Span:
    return Span(torch.tensor([token]), table)


def same_states(first: BlockTable, second: BlockTable, windows: Sequence[int | None]) -> bool:
    """Whether every layer holds the same K/V, in whatever pages, as far as the next token looks."""
    assert first.length == second.length

    def seen(table: BlockTable, layer: int) -> torch.Tensor:
        window = windows[layer]
        start = max(0, table.length + 1 - window) if window else 0
        return torch.stack(table.read(layer, table.length))[:, :, start:]

    return all(torch.equal(seen(first, layer), seen(second, layer)) for layer in range(len(windows)))


PAGES = [4, 48, 5000]
"""Positions of a page; the longest is the whole context."""


@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize("past", [0, 1, 2, 3, 6, 7, 30, 510, 511, 512, 600])
def test_logits_and_keys_and_values(pair: tuple[Decoder, NativeDecoder], past: int, page_tokens: int) -> None:
    reference, native = pair
    source = random.Random(past)
    prompt = [source.randrange(257) for _ in range(past)]
    first, second = filled(reference, prompt), filled(reference, prompt, page_tokens)
    for _ in range(4):
        token = source.randrange(257)
        assert torch.equal(native.forward([one(token, second)]), reference.forward([one(token, first)]))
    assert first.length == second.length == past + 4
    assert same_states(first, second, reference.config.windows)


def test_what_a_sequence_gets_does_not_depend_on_the_batch(pair: tuple[Decoder, NativeDecoder]) -> None:
    reference, native = pair
    prompts = [[5], [9, 9, 7], list(range(40)), list(range(100, 117)), [1, 2]]
    alone = [native.forward([one(3, filled(reference, prompt))]) for prompt in prompts]
    together = native.forward([one(3, filled(reference, prompt)) for prompt in prompts])
    assert torch.equal(together, torch.cat(alone))


PROMPTS = [1, 2, 3, 5, 11, 12, 31, 32, 33, 34, 63, 64, 65, 191, 192, 193, 194, 300, 511, 512, 513, 514]


@pytest.mark.parametrize("length", PROMPTS)
@pytest.mark.parametrize("pieces", ["whole", "odd", "small"])
def test_a_prompt_however_it_is_cut(pair: tuple[Decoder, NativeDecoder], length: int, pieces: str) -> None:
    reference, native = pair
    source = random.Random(length)
    prompt = torch.tensor([source.randrange(257) for _ in range(length)])
    first, second = new_table(reference, length), new_table(reference, length, 32)
    expected = reference.forward([Span(prompt, first)])
    for piece in prompt.split({"whole": length, "odd": 7 + length // 10, "small": 1 + length // 50}[pieces]):
        logits = native.forward([Span(piece, second, length)])
    assert torch.equal(logits, expected)
    assert same_states(first, second, reference.config.windows)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_layers_piece_by_piece(pair: tuple[Decoder, NativeDecoder], cut: int) -> None:
    """K/V of a layer is there when its piece returns; no length tells of it before the last."""
    prompt = torch.arange(3, 50)
    for programs in pair:
        whole, table = new_table(pair[0], 60), new_table(pair[0], 60)
        expected = programs.forward([Span(prompt, whole, 47)])
        hidden = None
        for first in range(0, programs.config.layers, cut):
            layers = range(first, min(first + cut, programs.config.layers))
            assert table.length == 0
            hidden = programs.forward_layers([Span(prompt, table, 47)], layers, hidden)
            for layer in layers:
                last = slice(max(0, 48 - (programs.config.windows[layer] or 48)), 47)
                assert torch.equal(
                    torch.stack(table.read(layer, 47))[..., last, :], torch.stack(whole.read(layer, 47))[..., last, :]
                )
        assert hidden is not None
        assert torch.equal(hidden, expected)
        assert table.length == 47


def test_a_prompt_among_single_tokens(pair: tuple[Decoder, NativeDecoder]) -> None:
    reference, native = pair
    prompt = torch.tensor([4, 5, 6])
    expected = [
        reference.forward([one(3, filled(reference, [8, 9]))]),
        reference.forward([Span(prompt, new_table(reference, 10))]),
        reference.forward([one(7, filled(reference, [1]))]),
    ]
    spans = [
        one(3, filled(reference, [8, 9])),
        Span(prompt, new_table(reference, 10), len(prompt)),
        one(7, filled(reference, [1])),
    ]
    assert torch.equal(native.forward(spans), torch.cat(expected))


def attended(
    kernels: Kernels,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    window: int = 0,
    scale: float | None = None,
    prompt: int = 1,
) -> torch.Tensor:
    """Of the positions from ``first`` on; ``query`` [T, heads, head_dim], keys [positions, head_dim]."""
    count, heads, head_dim = query.shape
    out = torch.empty_like(query)
    stride = heads * head_dim
    for page_tokens in (5, 32):
        pages, table = paged(keys, values, page_tokens)
        states = PagedRows(pages.data_ptr(), table.data_ptr(), pages[0, 0].numel(), page_tokens, pages[0].numel())
        found, out = out, torch.empty_like(query)
        kernels.library.attend(
            AttentionRows(first, count, prompt, window, scale or head_dim**-0.5), heads, head_dim, query.data_ptr(),
            stride, states, out.data_ptr(), stride,
        )  # fmt: skip
        assert page_tokens == 5 or torch.equal(found, out), "where the pages lie and end changes nothing"
    return out


def paged(keys: torch.Tensor, values: torch.Tensor, page_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages ``[pages, 2, page_tokens, head_dim]`` in any order, and the page of each run of positions."""
    count = -(-len(keys) // page_tokens)
    table = torch.randperm(count, generator=torch.Generator().manual_seed(count)).int()
    pages = torch.full((count, 2, page_tokens, keys.shape[1]), torch.nan, dtype=torch.bfloat16)
    for index, page in enumerate(table):
        for which, states in enumerate((keys, values)):
            part = states[index * page_tokens : (index + 1) * page_tokens]
            pages[page, which, : len(part)] = part
    return pages, table


def random_states(positions: int, count: int, heads: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    source = torch.Generator().manual_seed(positions)
    query = torch.randn(count, heads, head_dim, generator=source).mul(1.5).bfloat16()
    return query, *(torch.randn(positions, head_dim, generator=source).bfloat16() for _ in range(2))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 256])
@pytest.mark.parametrize("positions", [1, 7, 8, 9, 13, 100, 511, 512, 513, 1030])
@pytest.mark.parametrize("cancelling", [False, True])
def test_attention(kernels: Kernels, head_dim: int, positions: int, cancelling: bool) -> None:
    query, keys, values = random_states(positions, 1, 1, head_dim)
    if cancelling:  # equal weights, values that sum to nothing: what is left shows the order of the additions
        keys[:] = keys[:1].clone()
        values[positions - positions // 2 :] = -values[: positions // 2]
    expected = F.scaled_dot_product_attention(query[None], keys[None, None], values[None, None])[0]
    assert torch.equal(attended(kernels, query, keys, values, positions - 1), expected)


@pytest.mark.parametrize("positions", [2, 3, 4, 7, 11, 12, 15, 24, 31, 33, 57, 65, 194, 257, 514])
def test_attention_of_many(kernels: Kernels, positions: int) -> None:
    """An addition in another order shows in one of some thousand."""
    query, keys, values = random_states(positions, positions, max(12000 // positions, 40), 64)
    expected = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys[None, None], values[None, None], is_causal=True, enable_gqa=True
    )
    assert torch.equal(attended(kernels, query, keys, values, 0, prompt=positions), expected[0].transpose(0, 1))


@pytest.mark.parametrize("positions", [2, 3, 4, 7, 33, 64, 97, 225, 514, 800, 1300])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 100, 511, 512, 513])
def test_attention_of_a_prompt_within_a_window(kernels: Kernels, positions: int, window: int) -> None:
    query, keys, values = random_states(positions, positions, max(3000 // positions, 9), 32)
    scale = 0.3
    seen = torch.ones(positions, positions, dtype=torch.bool).tril().triu(1 - window)
    expected = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        *(states.expand(1, query.shape[1], -1, -1) for states in (keys, values)),
        attn_mask=seen,
        scale=scale,
    )
    whole = attended(kernels, query, keys, values, 0, window, scale, positions)
    assert torch.equal(whole, expected[0].transpose(0, 1))
    for first in (positions // 3, positions - 1):  # a later piece, when what no window reaches any more is gone
        keys[: max(first + 1 - window, 0)] = values[: max(first + 1 - window, 0)] = torch.nan
        later = attended(kernels, query[first:].contiguous(), keys, values, first, window, scale, positions)
        assert torch.equal(later, whole[first:])


@pytest.mark.parametrize("window", [0, 100])
def test_attention_of_settled_positions_is_that_of_any_longer_prompt(kernels: Kernels, window: int) -> None:
    """An addition in another order shows in one of some ten thousand; and there are other orders behind them."""
    longest, heads, others = 1100, 16, 0
    query, keys, values = random_states(longest, longest, heads, 32)
    whole = attended(kernels, query, keys, values, 0, window, prompt=longest)
    for prompt in (
        12,
        31,
        33,
        100,
        191,
        192,
        193,
        200,
        256,
        300,
        352,
        383,
        384,
        400,
        511,
        512,
        523,
        524,
        600,
        800,
        1023,
    ):
        found = attended(kernels, query[:prompt], keys[:prompt], values[:prompt], 0, window, prompt=prompt)
        settled = settled_tokens(prompt)
        assert torch.equal(found[:settled], whole[:settled]), f"{settled} of {prompt}"
        others += not torch.equal(found[settled:], whole[settled:prompt])
    assert others > 3


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 9, 32])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 100, 512, 600])
def test_attention_of_a_token_within_a_window(kernels: Kernels, heads: int, window: int) -> None:
    """The heads of a group are asked for like positions; what lies in front of the window is not looked at."""
    positions = 700
    for head_dim in (16, 64, 256):
        query, keys, values = random_states(positions, 1, heads, head_dim)
        expected = F.scaled_dot_product_attention(query[None], keys[None, None, -window:], values[None, None, -window:])
        keys[:-window] = values[:-window] = torch.nan
        assert torch.equal(attended(kernels, query, keys, values, positions - 1, window), expected[0])


def test_what_is_not_supported() -> None:
    assert supported(parse_config(Path(), TINY))
    assert not supported(parse_config(Path(), {**TINY, "head_dim": 20}))
