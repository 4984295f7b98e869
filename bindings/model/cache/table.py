"""The pages of one sequence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from numpy.typing import NDArray

from rowlock.bindings.model.cache.geometry import PAGE_TOKENS, CacheLimits, plan_geometry
from rowlock.bindings.model.cache.paged import PagedCache
from rowlock.bindings.model.cache.pages import PagesShortError
from rowlock.bindings.model.cache.prefix import page_keys
from rowlock.bindings.model.config import ModelConfig

NO_PAGE = -1


class BlockTable:
    """Where the K/V of one sequence lies: per cache group, the page of each ``page_tokens`` positions.

    ::

        begin ──> reserve ──> (a step computes) ──> advance ──> reserve ...  ──> release ──> begin ...

    Args:
        cache: whose pages it takes.
        capacity: tokens that it may grow to.

    Attributes:
        pages: of each group ``[capacity / page_tokens]``, int32; -1: none. They never move.
        length: tokens whose K/V every layer holds. A layer may be ahead while a step runs.

    """

    def __init__(self, cache: PagedCache, capacity: int) -> None:
        self.cache = cache
        self.capacity = capacity
        self.length = 0
        rows = cache.geometry.pages_of(capacity)
        self.pages: tuple[NDArray[np.int32], ...] = tuple(np.full(rows, NO_PAGE, np.int32) for _ in cache.groups)
        self._filled = 0
        self._looks_from = 0
        self._keys: list[bytes] = []
        self._kept = 0
        self._epoch = cache.epoch
        cache.join(self)

    @property
    def held(self) -> list[list[int]]:
        """The pages of each group that it holds."""
        return [table[table >= 0].tolist() for table in self.pages]

    def begin(self, prompt: NDArray[np.int64], settled: int) -> None:
        """Take over what is known of a prompt, but not its last token: something must be computed for its logits.

        Args:
            prompt: its tokens.
            settled: leading tokens whose K/V has the same bits in every prompt that begins with them.

        """
        assert not self._filled, "the table holds pages already"
        size = self.cache.geometry.page_tokens
        self._keys = list(page_keys(prompt[:settled], size))
        self._epoch = self.cache.epoch
        found = self.cache.find_prefix(self._keys[: (len(prompt) - 1) // size])
        self._filled = self._kept = len(found[0])
        self.length = self._looks_from = self._filled * size
        for table, pages in zip(self.pages, found, strict=True):
            table[: len(pages)] = pages

    def reserve(self, count: int) -> None:
        """Have pages for the next ``count`` tokens. Raises PagesShortError, and then takes none."""
        assert self.length + count <= self.capacity, "the sequence is full"
        self._take(self.length + count)

    def reserve_whole(self, tokens: int) -> None:
        """Have pages for ``tokens`` in all, of which those that a window has passed by then are never written.

        Raises PagesShortError, and then takes none.
        """
        self._looks_from = tokens
        self._let_go()
        self._take(tokens)

    def check_room(self, count: int) -> None:
        """There are pages for the next ``count`` tokens. Raises AssertionError."""
        assert self.length + count <= self._filled * self.cache.geometry.page_tokens, "tokens without a page"

    def advance(self, count: int) -> None:
        """A step has written K/V of the next ``count`` tokens in every layer."""
        self.length += count
        self._looks_from = max(self._looks_from, self.length)
        self._keep_prefixes()
        self._let_go()

    def release(self) -> None:
        """Give every page back, and forget what they held. It may begin again."""
        for group, table in zip(self.cache.groups, self.pages, strict=True):
            for page in table[table >= 0].tolist():
                group.pool.give_back(page)
            table[:] = NO_PAGE
        self.length = self._looks_from = self._filled = self._kept = 0
        self._keys = []

    def close(self) -> None:
        """Give every page back. Not to be used any more."""
        self.release()
        self.cache.leave(self)

    def abandon(self, first: int) -> None:
        """Quarantine the pages of positions ``first`` on, which nobody else may hold, and close."""
        start = first // self.cache.geometry.page_tokens
        for group, table in zip(self.cache.groups, self.pages, strict=True):
            for page in table[start:][table[start:] >= 0].tolist():
                group.pool.quarantine(page)
            table[start:] = NO_PAGE
        self.close()

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[kv_heads, T, head_dim]`` behind ``length``; returns all K and V up to there, contiguous."""
        self.write(layer, self.length, torch.stack((key, value)))
        return self.read(layer, self.length + key.shape[1])

    def write(self, layer: int, first: int, states: torch.Tensor) -> None:
        """Put K/V ``[2, kv_heads, T, head_dim]`` of a layer at positions ``first`` on, which must have pages."""
        group, at = self.cache.places[layer]
        size, positions = self.cache.geometry.page_tokens, np.arange(first, first + states.shape[2])
        pages = self.pages[group][positions // size]
        assert (pages >= 0).all(), "there is no page for some of these positions"
        target = self.cache.groups[group].states[at]
        rows, offsets = (torch.from_numpy(part).long().to(target.device) for part in (pages, positions % size))
        for which in range(2):
            target[rows, which, :, offsets] = states[which].transpose(0, 1).to(target.device)

    def read(self, layer: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[kv_heads, stop, head_dim]`` of a layer; zeros where the window has passed."""
        group, at = self.cache.places[layer]
        states, size = self.cache.groups[group].states[at], self.cache.geometry.page_tokens
        table = self.pages[group][: self.cache.geometry.pages_of(stop)]
        passed = int((table >= 0).argmax())
        rows = torch.from_numpy(table[passed:]).long().to(states.device)
        joined = states[rows].permute(1, 2, 0, 3, 4).flatten(2, 3)
        if passed:
            joined = F.pad(joined, (0, 0, passed * size, 0))
        return joined[0, :, :stop], joined[1, :, :stop]

    def check_integrity(self) -> None:
        """Each group has pages from what its window needs up to what was reserved. Raises AssertionError."""
        size = self.cache.geometry.page_tokens
        assert self.length <= self._filled * size, "there is K/V without a page"
        for group, table in zip(self.cache.groups, self.pages, strict=True):
            first = min(group.group.first_needed(self._looks_from) // size, self._filled)
            there = table >= 0
            assert there[first : self._filled].all(), "a page is missing"
            assert not there[:first].any(), "a page is there that no window needs"
            assert not there[self._filled :].any(), "a page is there that was not reserved"

    def _take(self, tokens: int) -> None:
        size, stop = self.cache.geometry.page_tokens, self.cache.geometry.pages_of(tokens)
        if stop <= self._filled:
            return
        starts = [max(self._filled, group.group.first_needed(self._looks_from) // size) for group in self.cache.groups]
        for group, start in zip(self.cache.groups, starts, strict=True):
            if group.available < stop - start:
                raise PagesShortError(f"{stop - start} pages are needed, {group.available} can be had")
        for group, table, start in zip(self.cache.groups, self.pages, starts, strict=True):
            table[start:stop] = group.take(stop - start)
        self._filled = stop

    def _keep_prefixes(self) -> None:
        """Full pages of the prompt may serve other prompts, unless the weights have changed since it began."""
        full = min(self.length // self.cache.geometry.page_tokens, len(self._keys))
        if self._epoch == self.cache.epoch:
            for index in range(self._kept, full):
                self.cache.keep_prefix(self._keys[index], [int(table[index]) for table in self.pages])
        self._kept = max(self._kept, full)

    def _let_go(self) -> None:
        """Pages that a window has passed."""
        size = self.cache.geometry.page_tokens
        for group, table in zip(self.cache.groups, self.pages, strict=True):
            first = group.group.first_needed(self._looks_from) // size
            for index in np.flatnonzero(table[:first] >= 0).tolist():
                group.pool.give_back(int(table[index]))
                table[index] = NO_PAGE


def table_for_one(
    config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device, page_tokens: int = PAGE_TOKENS
) -> BlockTable:
    """The table of a sequence that shares pages with nobody, with all of its pages."""
    planned = plan_geometry(config, dtype.itemsize, CacheLimits(page_tokens=page_tokens), 1 << 62)
    pages = planned.pages_of(capacity)
    groups = tuple(replace(group, pages=pages) for group in planned.groups)
    table = BlockTable(PagedCache(config, replace(planned, groups=groups), dtype, device), capacity)
    table.reserve(capacity)
    return table
