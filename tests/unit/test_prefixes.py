"""A prompt gives the same bits whether or not its beginning was computed before, by whatever other prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import TINY
from support.kernels import kernels_or_skip
from support.reference import loaded, new_table

from rowlock.bindings.cpu.binding import CpuBinding
from rowlock.bindings.cpu.decode import NativeDecoder
from rowlock.bindings.cpu.kernel_library import Kernels, load_kernels
from rowlock.bindings.device import Counters, DeviceError, Preempted, Sampling, Step
from rowlock.bindings.model.cache.geometry import CacheLimits, plan_geometry
from rowlock.bindings.model.cache.paged import PagedCache
from rowlock.bindings.model.cache.reservation import Reservation
from rowlock.bindings.model.cache.table import table_for_one
from rowlock.bindings.model.config import ModelConfig, parse_config
from rowlock.bindings.model.decoder import Decoder, Span
from rowlock.bindings.model.generation import DecoderSequence, Stepper
from rowlock.bindings.model.layout import build_layout

CONFIG = parse_config(
    Path(),
    {
        **TINY, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 1600,
    },
)  # fmt: skip
MODELS = {"all layers look everywhere": CONFIG, "one within a window": replace(CONFIG, windows=(100, None))}
PAGE = 4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS)
def native(request: pytest.FixtureRequest) -> NativeDecoder:
    library = kernels_or_skip()
    config: ModelConfig = request.param
    source = torch.Generator().manual_seed(0)
    weights = {
        name: (
            torch.randn(parent.rows, parent.row_bytes // 2, generator=source) * (1 if parent.rows == 1 else 0.25)
        ).to(torch.bfloat16)
        for name, parent in build_layout(config, "BF16").parents.items()
    }
    return NativeDecoder(Decoder(config, weights), weights, Kernels(library, 1), Counters())


def new_cache(native: NativeDecoder, tokens: int, page_tokens: int = PAGE) -> PagedCache:
    """With room for so many tokens in every layer."""
    planned = plan_geometry(native.config, 2, CacheLimits(page_tokens=page_tokens), 1 << 40)
    groups = tuple(replace(group, pages=planned.pages_of(tokens)) for group in planned.groups)
    return PagedCache(native.config, replace(planned, groups=groups), torch.bfloat16, torch.device("cpu"))


def states_of(sequence: DecoderSequence, first: int = 0) -> torch.Tensor:
    """K/V from position ``first`` on: ``[layers, 2, kv_heads, length - first, head_dim]``."""
    table = sequence.pages
    states = [torch.stack(table.read(layer, table.length)) for layer in range(CONFIG.layers)]
    return torch.stack(states)[..., first:, :]


def prompt_states(
    native: NativeDecoder, cache: PagedCache, prompt: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """K/V and last logits of what of a prompt is not found, and how many of its tokens are."""
    sequence = DecoderSequence.opened(cache, native, prompt, Sampling(), len(prompt))
    sequence.begin()
    found, pieces = sequence.pages.length, []
    while sequence.waiting:
        span = sequence.next_span(60)  # less than the window: all of it is still there after the step
        sequence.pages.reserve(len(span.tokens))
        first = sequence.pages.length
        logits = native.forward([span])
        pieces.append(states_of(sequence, first))
    sequence.close()
    cache.check_integrity()
    return torch.cat(pieces, dim=3), logits[0], found


LENGTHS = [
    5, 12, 13, 31, 33, 40, 64, 96, 100, 190, 191, 192, 193, 194, 200, 224, 256, 257, 300, 320, 383, 384, 385, 400, 450,
    510, 511, 512, 513, 516, 524, 530, 600, 703, 704, 720, 767, 768, 769, 800, 895, 900, 1023, 1024, 1025, 1100, 1300,
]  # fmt: skip
"""Around every border at which the order of additions changes: blocks of 32, 64, 256 queries, of 512 keys."""
STREAM = [random.Random(1).randrange(300) for _ in range(1600)]


@pytest.fixture(scope="module")
def alone(native: NativeDecoder) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """K/V and logits of the stream's first tokens, each computed in an empty cache."""
    return {length: prompt_states(native, new_cache(native, 1600), tuple(STREAM[:length]))[:2] for length in LENGTHS}


def test_settled_is_what_no_longer_prompt_changes(
    native: NativeDecoder, alone: dict[int, tuple[torch.Tensor, torch.Tensor]]
) -> None:
    """Also the other way round: it is not much less than what really is equal in all of them."""
    for length in LENGTHS:
        settled = native.settled(length)
        assert 0 <= settled <= length
        for longer in LENGTHS:
            if longer > length:
                assert torch.equal(alone[length][0][..., :settled, :], alone[longer][0][..., :settled, :]), (
                    f"{settled} of {length} tokens against {longer}"
                )


@pytest.mark.parametrize("first", [96, 300, 384, 600, 1024])
def test_a_hit_changes_no_bit(
    native: NativeDecoder, alone: dict[int, tuple[torch.Tensor, torch.Tensor]], first: int
) -> None:
    hits = 0
    for length in LENGTHS:
        cache = new_cache(native, 3200)
        prompt_states(native, cache, tuple(STREAM[:first]))
        states, logits, found = prompt_states(native, cache, tuple(STREAM[:length]))
        assert torch.equal(logits, alone[length][1]), f"a prompt of {length} after one of {first}: {found} tokens found"
        assert torch.equal(states, alone[length][0][..., found:, :]), (
            f"a prompt of {length} after one of {first}: {found} tokens found"
        )
        assert found <= min(native.settled(first), native.settled(length), length - 1)
        hits += found
    assert hits > 10 * min(first, 100), "prefixes were found"


def generate(
    native: NativeDecoder, cache: PagedCache, prompts: list[tuple[int, ...]], tokens: int, steps: int = 10000
) -> tuple[list[list[int]], int]:
    """Greedy tokens of prompts that run together, and how often one was preempted; those wait for room."""
    stepper, preemptions = Stepper(native), 0
    waiting = [DecoderSequence.opened(cache, native, prompt, Sampling(), len(prompt) + tokens) for prompt in prompts]
    running: list[DecoderSequence] = []
    every, found = list(waiting), {id(item): list[int]() for item in waiting}
    for _ in range(steps):
        if waiting and (not running or cache.has_room(waiting[0].waiting + 3)):
            running.append(waiting.pop(0))
        for item, step in zip(list(running), stepper.advance(list(running), 24), strict=True):
            cache.check_integrity()
            if step is Preempted.PREEMPTED:
                preemptions += 1
                running.remove(item)
                waiting.insert(0, item)
            elif isinstance(step, int):
                found[id(item)].append(step)
                if len(found[id(item)]) == tokens:
                    running.remove(item)
                    item.close()
        if not running and not waiting:
            return [found[id(item)] for item in every], preemptions
    raise AssertionError("they did not end")


@pytest.mark.parametrize("page_tokens", [4, 32])
def test_preempted_sequences_get_the_tokens_that_they_would_have_got(native: NativeDecoder, page_tokens: int) -> None:
    source = random.Random(page_tokens)
    prompts = [tuple(source.randrange(300) for _ in range(length)) for length in (50, 13, 90, 1, 30)]
    expected = [generate(native, new_cache(native, 1600), [prompt], 40)[0][0] for prompt in prompts]
    roomy, none = generate(native, new_cache(native, 1600), prompts, 40)
    assert (roomy, none) == (expected, 0)
    tight, some = generate(native, new_cache(native, 160, page_tokens), prompts, 40)
    assert tight == expected
    assert some > 1


def test_what_is_computed_again_has_the_same_bits(native: NativeDecoder) -> None:
    cache = new_cache(native, 400)
    sequence = DecoderSequence.opened(cache, native, tuple(STREAM[:70]), Sampling(), 150)
    stepper = Stepper(native)
    while sequence.pages.length < 130:
        stepper.advance([sequence], 24)
    before = states_of(sequence)
    sequence.preempt()
    cache.forget_prefixes()
    while sequence.pages.length < 130:
        stepper.advance([sequence], 24)
    after = states_of(sequence)
    assert torch.equal(after[1, ..., :130, :], before[1])
    assert torch.equal(after[..., 36:130, :], before[..., 36:, :]), "what the window has passed by then is not there"


@pytest.mark.parametrize("known", [0, 40, 60])
def test_a_prompt_computed_elsewhere_goes_on_as_if_it_had_been_computed_here(native: NativeDecoder, known: int) -> None:
    prompt = tuple(STREAM[:70])
    (expected,), _ = generate(native, new_cache(native, 400), [prompt], 20)
    source = table_for_one(native.config, 70, torch.bfloat16, torch.device("cpu"))
    span = Span(torch.tensor(prompt), source, 70)
    cache, hidden = new_cache(native, 400), None
    pieces: list[torch.Tensor] = []
    if known:
        generate(native, cache, [prompt[:known]], 1)
    for layer in range(CONFIG.layers):
        hidden = native.forward_layers([span], range(layer, layer + 1), hidden)
        pieces.append(torch.stack(source.read(layer, 70)))
    assert hidden is not None
    reservation = Reservation(cache, np.array(prompt), 90, native.settled(70))
    assert reservation.first == {0: 0, 40: 40, 60: 56}[known]
    for layer, states in reversed(list(enumerate(pieces))):
        wanted = reservation.wanted(layer)
        reservation.write(layer, wanted.start, states[:, :, wanted.start :].view(torch.int16).numpy()[None])
        cache.check_integrity()
    sequence = DecoderSequence.admitted(reservation, native, Sampling())
    tokens: list[Step] = [sequence.accept(hidden[0])]
    while len(tokens) < 20:
        tokens += Stepper(native).advance([sequence], 24)
    assert tokens == expected
    sequence.close()
    cache.check_integrity()


def test_torch_reuses_nothing() -> None:
    """Its bits depend on how many rows it is given."""
    weights = {
        name: torch.zeros(parent.rows, parent.row_bytes // 4)
        for name, parent in build_layout(CONFIG, "F32").parents.items()
    }
    decoder = Decoder(CONFIG, weights)
    assert (decoder.settled(1000), decoder.replayed) == (0, 1)
    assert isinstance(Span(torch.tensor([1]), new_table(decoder, 1)).table.length, int)


def test_k_v_of_before_a_write_is_not_let_in(tiny: Path) -> None:
    binding = CpuBinding(threads=1)
    runtime = loaded(binding, tiny)
    logits = np.zeros(257, np.int16)
    runtime.importer.open((1, 2, 3), Sampling(), 8).admit(logits)[0].close()
    late, embed = runtime.importer.open((1, 2, 3), Sampling(), 8), runtime.allocations["embed"]
    binding.memory.write_rows(embed, 0, np.zeros(embed.parent.row_bytes, np.uint8))
    with pytest.raises(DeviceError, match="weights were written"):
        late.admit(logits)
    late.release()
    binding.close()


NOT_A_NUMBER = 0x7FC0


@pytest.mark.skipif(load_kernels() is None, reason="torch's programs keep nothing that could be found")
def test_what_gave_logits_that_are_not_finite_is_not_found_by_others(tiny: Path) -> None:
    """Whether a prompt was computed elsewhere or here."""
    binding = CpuBinding(threads=1)
    runtime = loaded(binding, tiny)
    prompt = tuple(range(100))
    logits = np.zeros(260, np.int16)
    for good in (True, False):
        logits[3] = 0 if good else NOT_A_NUMBER
        sequence, step = runtime.importer.open(prompt, Sampling(), 110).admit(logits)
        sequence.close()
        assert isinstance(step, int if good else DeviceError)
        again = runtime.importer.open(prompt, Sampling(), 110)
        assert (again.wanted(0).start > 0) is good
        again.release()
    norm = runtime.allocations["norm"]
    binding.memory.write_rows(norm, 0, np.full(norm.parent.row_bytes // 2, NOT_A_NUMBER, np.uint16).view(np.uint8))
    local = runtime.open_sequence(prompt, Sampling(), 110)
    (step,) = runtime.advance([local])
    assert isinstance(step, DeviceError)
    local.close()
    again = runtime.importer.open(prompt, Sampling(), 110)
    assert again.wanted(0).start == 0
    again.release()
    runtime._current_cache().check_integrity()
    binding.close()
