"""Pages of K/V: who holds which, what may be found again, and what nobody may see yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.checkpoints import TINY

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.cache.geometry import CacheGeometry, CacheLimits, plan_geometry
from rowlock.bindings.model.cache.paged import PagedCache
from rowlock.bindings.model.cache.pages import PagesShortError
from rowlock.bindings.model.cache.reservation import Reservation
from rowlock.bindings.model.cache.table import BlockTable
from rowlock.bindings.model.config import ModelConfig, parse_config

WHOLE = parse_config(
    Path(),
    {
        **TINY, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "max_position_embeddings": 64,
    },
)  # fmt: skip
HYBRID = replace(WHOLE, layers=4, windows=(6, 6, None, 6))
VALUE_BYTES = 2


def new_cache(config: ModelConfig, pages: tuple[int, ...], page_tokens: int = 4) -> PagedCache:
    planned = plan_geometry(config, VALUE_BYTES, CacheLimits(page_tokens=page_tokens), 1 << 30)
    groups = tuple(replace(group, pages=count) for group, count in zip(planned.groups, pages, strict=True))
    geometry = CacheGeometry(page_tokens, planned.token_bytes, groups)
    return PagedCache(config, geometry, torch.bfloat16, torch.device("cpu"))


def prompt_of(*tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(tokens, np.int64)


def states(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((2, 1, count, 8), value, dtype=torch.bfloat16)


def values(states: torch.Tensor) -> np.ndarray:
    """Of one layer, as they come from elsewhere."""
    return states.view(torch.int16 if states.dtype == torch.bfloat16 else torch.int32).numpy()[None]


def computed(cache: PagedCache, tokens: list[int], settled: int | None = None) -> BlockTable:
    """A table after its whole prompt; K/V of a position is its token."""
    table = BlockTable(cache, 64)
    table.begin(np.array(tokens, np.int64), len(tokens) if settled is None else settled)
    while table.length < len(tokens):
        step = min(3, len(tokens) - table.length)
        table.reserve(step)
        for layer in range(len(cache.places)):
            for at in range(table.length, table.length + step):
                table.write(layer, at, states(1, tokens[at]))
        table.advance(step)
    return table


def test_layers_that_look_equally_far_share_a_group() -> None:
    geometry = plan_geometry(HYBRID, VALUE_BYTES, CacheLimits(page_tokens=4), 1 << 30)
    assert [(group.window, group.layers) for group in geometry.groups] == [(None, (2,)), (6, (0, 1, 3))]
    assert geometry.token_bytes == 2 * 8 * VALUE_BYTES
    assert geometry.groups[0].pages == 8 * 64 // 4


@pytest.mark.parametrize("page_tokens", [4, 32, 64, 4096])
def test_any_page_up_to_the_whole_context(page_tokens: int) -> None:
    geometry = plan_geometry(WHOLE, VALUE_BYTES, CacheLimits(page_tokens=page_tokens), 1 << 30)
    assert geometry.page_tokens == min(page_tokens, 64)
    assert geometry.groups[0].pages * geometry.page_tokens == 8 * 64


def test_bytes_are_kept_to_and_a_share_of_memory_is_the_default() -> None:
    page = 4 * 2 * 32
    given = plan_geometry(WHOLE, VALUE_BYTES, CacheLimits(10 * page + 1, 4), 1 << 30)
    assert (given.groups[0].pages, given.nbytes) == (10, 10 * page)
    assert plan_geometry(WHOLE, VALUE_BYTES, CacheLimits(0, 4), 40 * page).groups[0].pages == 10
    with pytest.raises(
        DeviceError, match=f"serving.cache_bytes: 5 bytes hold no page of 4 tokens, which takes {page}"
    ) as refused:
        plan_geometry(WHOLE, VALUE_BYTES, CacheLimits(5, 4), 1 << 30)
    assert refused.value.fault is DeviceFault.OUT_OF_MEMORY


def test_what_can_never_fit_is_told_with_numbers() -> None:
    cache = new_cache(WHOLE, (3,))
    assert not cache.lacking(12)
    assert cache.lacking(13) == "13 tokens need 4 pages of 4 tokens each, the cache has 3"


def test_a_window_lets_its_earlier_pages_go() -> None:
    cache = new_cache(HYBRID, (16, 8))
    table = computed(cache, list(range(1, 42)), settled=0)
    assert [len(pages) for pages in table.held] == [11, 2]
    cache.check_integrity()
    keys, values = table.read(0, 41)
    assert keys[0, 36:, 0].tolist() == values[0, 36:, 0].tolist() == [37, 38, 39, 40, 41]
    assert not keys[0, :32].any(), "what the window has passed reads as zeros"
    assert table.read(2, 41)[0][0, :, 0].tolist() == list(range(1, 42))


def test_pages_run_short_and_nothing_is_taken() -> None:
    cache = new_cache(WHOLE, (3,))
    first, second = BlockTable(cache, 64), BlockTable(cache, 64)
    first.reserve(5)
    with pytest.raises(PagesShortError, match="2 pages are needed, 1 can be had"):
        second.reserve(8)
    assert second.held == [[]]
    first.release()
    second.reserve(8)
    cache.check_integrity()


def test_full_settled_pages_of_a_prompt_are_found_again() -> None:
    cache = new_cache(WHOLE, (20,))
    tokens = list(range(1, 15))
    first = computed(cache, tokens, settled=9)  # two full pages
    again = BlockTable(cache, 64)
    again.begin(np.array(tokens, np.int64), 14)
    assert again.length == cache.hit_tokens == 8
    assert again.held[0] == first.held[0][:2]
    assert torch.equal(again.read(1, 8)[0], first.read(1, 8)[0])
    other = BlockTable(cache, 64)
    other.begin(prompt_of(1, 2, 3, 4, 5, 6, 7, 9, 9), 9)
    assert other.length == 4, "the second page differs in its last token"
    late = BlockTable(cache, 64)
    late.begin(prompt_of(5, 6, 7, 8, 9), 5)
    assert late.length == 0, "the same tokens after others are another page"
    cache.check_integrity()


def test_the_last_token_of_a_prompt_is_never_found() -> None:
    cache = new_cache(WHOLE, (20,))
    computed(cache, list(range(8)))
    again = BlockTable(cache, 64)
    again.begin(np.arange(8), 8)
    assert again.length == 4


def test_a_hit_needs_what_every_window_looks_at() -> None:
    cache = new_cache(HYBRID, (20, 8))
    tokens = list(range(1, 24))
    computed(cache, tokens).close()
    windowed = cache.groups[1]
    keys = list(windowed.prefixes._pages)
    again = BlockTable(cache, 64)
    again.begin(np.array(tokens, np.int64), len(tokens))
    assert again.length == 20
    assert (again.pages[1][:5] >= 0).tolist() == [False, False, False, True, True]
    again.close()
    windowed.pool.drop(windowed.prefixes._pages.pop(keys[4]))  # as an eviction would
    again = BlockTable(cache, 64)
    again.begin(np.array(tokens, np.int64), len(tokens))
    assert again.length == 16, "of the longer beginning a layer lacks what it would look at"


def test_kept_pages_give_way_oldest_first() -> None:
    cache = new_cache(WHOLE, (4,))
    computed(cache, [1] * 8).close()
    computed(cache, [2] * 8).close()
    assert cache.use.groups[0].cached == 4
    assert cache.has_room(16)
    third = computed(cache, [3] * 5, settled=0)
    assert third.length == 5
    for token, known in ((1, 0), (2, 4)):
        table = BlockTable(cache, 64)
        table.begin(np.full(8, token), 8)
        assert table.length == known
        table.close()
    cache.check_integrity()


def test_what_was_forgotten_is_not_found_and_not_kept_by_those_who_began_before() -> None:
    cache = new_cache(WHOLE, (20,))
    computed(cache, [1] * 8)
    running = BlockTable(cache, 64)
    running.begin(np.full(12, 2), 12)
    running.reserve(12)
    cache.forget_prefixes()
    running.advance(12)  # computed by the weights of before
    for token in (1, 2):
        table = BlockTable(cache, 64)
        table.begin(np.full(12, token), 12)
        assert table.length == 0
    cache.check_integrity()


def test_a_reservation_is_seen_by_nobody_until_it_is_admitted() -> None:
    cache = new_cache(HYBRID, (20, 8))
    prompt = np.arange(1, 18)
    reservation = Reservation(cache, prompt, 30, 17)
    assert list(reservation.wanted(2)) == list(range(17))
    assert list(reservation.wanted(0)) == list(range(12, 17))
    for layer in range(4):
        wanted = reservation.wanted(layer)
        reservation.write(layer, wanted.start, values(states(len(wanted), 3)))
    probe = BlockTable(cache, 64)
    probe.begin(prompt, 17)
    assert probe.length == 0
    cache.check_integrity()
    table = reservation.admit()
    assert table.length == 17
    assert table.read(2, 17)[0].eq(3).all()
    cache.check_integrity()
    probe.begin(prompt, 17)
    assert probe.length == 0, "the pages that a longer window would have needed were never there"
    cache.check_integrity()


def test_what_was_admitted_is_found_by_the_next() -> None:
    cache = new_cache(WHOLE, (20,))
    prompt = np.arange(1, 18)
    reservation = Reservation(cache, prompt, 30, 17)
    for layer in range(2):
        reservation.write(layer, 0, values(states(17)))
    reservation.admit()
    probe = BlockTable(cache, 64)
    probe.begin(prompt, 17)
    assert probe.length == 16
    cache.check_integrity()


def test_a_reservation_over_a_known_beginning_wants_the_rest() -> None:
    cache = new_cache(WHOLE, (20,))
    computed(cache, [5] * 12, settled=8)
    reservation = Reservation(cache, np.full(12, 5), 20, 12)
    assert (reservation.first, list(reservation.wanted(0))) == (8, [8, 9, 10, 11])
    with pytest.raises(ValueError, match="K/V of positions 4 to 8, wanted 8 to 12"):
        reservation.write(0, 4, values(states(4)))
    reservation.release()
    reservation.release()
    cache.check_integrity()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (torch.zeros(2, 2, 1, 8, dtype=torch.bfloat16), r"shape \[1, 2, 2, 1, 8\], wanted \[layers, 2, 1, T, 8\]"),
        (torch.zeros(2, 1, 8, dtype=torch.bfloat16), r"shape \[1, 2, 1, 8\]"),
        (torch.zeros(2, 1, 1, 8), "values of 4 bytes, wanted 2"),
        (torch.zeros(2, 1, 0, 8, dtype=torch.bfloat16), "positions 3 to 3"),
        (torch.zeros(2, 1, 2, 8, dtype=torch.bfloat16), "positions 3 to 5, wanted 0 to 4"),
    ],
)
def test_what_does_not_fit_a_reservation_is_not_written(wrong: torch.Tensor, told: str) -> None:
    cache = new_cache(WHOLE, (20,))
    cache.groups[0].states.fill_(7)
    reservation = Reservation(cache, np.arange(4), 10, 0)
    with pytest.raises(ValueError, match=told):
        reservation.write(0, 3, values(wrong))
    assert cache.groups[0].states.eq(7).all()


def test_layers_of_one_group_are_written_together_and_of_two_not_at_all() -> None:
    cache = new_cache(HYBRID, (20, 8))
    reservation = Reservation(cache, np.arange(1, 5), 30, 4)
    both = np.stack([values(states(4, layer))[0] for layer in (2, 3)])
    reservation.write(0, 0, both)
    with pytest.raises(ValueError, match="layers 1 to 3, which are not of one cache group"):
        reservation.write(1, 0, both)
    table = reservation.admit()
    assert table.read(0, 4)[1].eq(2).all()
    assert table.read(1, 4)[0].eq(3).all()


@pytest.mark.parametrize("held", [0, 1])
def test_the_way_to_the_memory_of_a_device_writes_the_same(held: int) -> None:
    """`held`: pages that lie one behind the other, and pages that do not."""
    found = []
    for on_host in (True, False):
        cache = new_cache(WHOLE, (20,))
        cache.groups[0].states.zero_()
        tables = [computed(cache, [1] * 4, settled=0) for _ in range(3 * held)]
        if tables:
            tables[1].close()
        if not on_host:
            cache.groups[0].host = None
        reservation = Reservation(cache, np.arange(1, 12), 30, 0)
        both = np.random.default_rng(0).integers(0, 1000, (2, 2, 1, 11, 8)).astype(np.int16)
        reservation.write(0, 0, both)
        found.append(reservation.admit().read(1, 11)[0].view(torch.int16))
        assert (found[-1].numpy() == both[1, 0]).all()
    assert torch.equal(*found)


def test_a_reservation_that_finds_no_pages_holds_none() -> None:
    cache = new_cache(WHOLE, (3,))
    with pytest.raises(PagesShortError):
        Reservation(cache, np.arange(13), 20, 0)
    assert cache.use.groups[0].free == 3
    cache.check_integrity()


def test_quarantined_pages_are_never_used_again() -> None:
    cache = new_cache(WHOLE, (6,))
    computed(cache, [5] * 8)
    reservation = Reservation(cache, np.full(12, 5), 20, 12)
    reservation.quarantine()
    use = cache.use.groups[0]
    assert (use.quarantined, use.free, use.in_use, use.cached) == (1, 3, 2, 0)
    with pytest.raises(PagesShortError):
        BlockTable(cache, 64).reserve(16)
    cache.check_integrity()


class Pages(RuleBasedStateMachine):
    """Sequences and reservations come, grow and go, over a cache that is too small for all of them."""

    @initialize(hybrid=st.booleans())
    def start(self, hybrid: bool) -> None:
        self.cache = new_cache(HYBRID, (14, 10)) if hybrid else new_cache(WHOLE, (14,))
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.reservations: list[tuple[Reservation, list[int]]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20), settled=st.integers(0, 20))
    def begin(self, tokens: list[int], settled: int) -> None:
        table = BlockTable(self.cache, 40)
        table.begin(np.array(tokens, np.int64), min(settled, len(tokens)))
        assert table.length < len(tokens)
        self.tables.append((table, tokens))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), count=st.integers(1, 6))
    def grow(self, data: st.DataObject, count: int) -> None:
        table, tokens = data.draw(st.sampled_from(self.tables))
        tokens += [1] * (table.length + count - len(tokens))
        if table.length + count > 40:
            return
        try:
            table.reserve(count)
        except PagesShortError:
            return
        for layer in range(len(self.cache.places)):
            for at in range(table.length, table.length + count):
                table.write(layer, at, states(1, 1 + at + 100 * tokens[at]))
        table.advance(count)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), close=st.booleans())
    def leave(self, data: st.DataObject, close: bool) -> None:
        item = data.draw(st.sampled_from(self.tables))
        item[0].release()
        if close:
            item[0].close()
            self.tables.remove(item)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def reserve(self, tokens: list[int]) -> None:
        try:
            item = Reservation(self.cache, np.array(tokens, np.int64), 40, len(tokens))
        except PagesShortError:
            return
        for layer in range(len(self.cache.places)):
            for at in item.wanted(layer):
                item.write(layer, at, values(states(1, 1 + at + 100 * tokens[at])))
        self.reservations.append((item, tokens))

    @precondition(lambda self: self.reservations)
    @rule(data=st.data(), end=st.sampled_from(["admit", "release", "quarantine"]))
    def end(self, data: st.DataObject, end: str) -> None:
        reservation, tokens = item = data.draw(st.sampled_from(self.reservations))
        self.reservations.remove(item)
        if end == "admit":
            self.tables.append((reservation.admit(), tokens))
        else:
            getattr(reservation, end)()

    @rule()
    def forget(self) -> None:
        self.cache.forget_prefixes()

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check_integrity()

    @invariant()
    def everybody_reads_its_own(self) -> None:
        for table, tokens in getattr(self, "tables", []):
            for layer in range(len(self.cache.places) if table.length else 0):
                group = self.cache.geometry.groups[self.cache.places[layer][0]]
                first = group.first_needed(table.length)
                keys, values = table.read(layer, table.length)
                wanted = torch.tensor([1 + at + 100 * tokens[at] for at in range(first, table.length)])
                wanted = wanted.to(torch.bfloat16)
                assert torch.equal(keys[0, first:, 3], wanted)
                assert torch.equal(values[0, first:, 3], wanted)


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
