"""The K/V of a resident model: pages in one tensor per cache group, handed out to sequences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch

from rowlock.bindings.device import CacheGroupUse, CacheUse, DeviceError, DeviceFault
from rowlock.bindings.host_arena import aligned_bytes
from rowlock.bindings.model.cache.ahead import MemoryAhead
from rowlock.bindings.model.cache.geometry import CacheGeometry, CacheGroup
from rowlock.bindings.model.cache.pages import PagePool
from rowlock.bindings.model.cache.prefix import PrefixIndex
from rowlock.bindings.model.config import ModelConfig

if TYPE_CHECKING:
    from rowlock.bindings.model.cache.table import BlockTable

INTEGERS: Final = {2: torch.int16, 4: torch.int32}
"""By bytes."""


class GroupPages:
    """The pages of one cache group.

    Attributes:
        states: ``[layers, pages, 2, kv_heads, page_tokens, head_dim]``.
        shape: of these.
        host: the same memory as integers of that size, if it is the host's: numpy has no bfloat16.
        pool: who holds which page.
        prefixes: pages that are kept for prompts to come.

    """

    def __init__(self, group: CacheGroup, states: torch.Tensor) -> None:
        self.group = group
        self.states = states
        self.shape = tuple(states.shape)
        self.pool = PagePool(group.pages)
        self.prefixes = PrefixIndex(self.pool)
        on_host = states.device.type == "cpu"
        self.host = states.view(INTEGERS[states.dtype.itemsize]).numpy() if on_host else None
        self._ahead = _memory_ahead(states) if on_host and states.numel() else None

    @property
    def available(self) -> int:
        """Pages that are free, or kept only for prompts to come."""
        return self.pool.free + self.pool.idle

    def take(self, count: int) -> list[int]:
        """So many pages, at the cost of what is kept for prompts to come. Raises PagesShortError."""
        if count > self.pool.free:
            self.prefixes.evict(count)
        taken = self.pool.take(count)
        if self._ahead is not None and taken:
            self._ahead.used(max(taken) + 1)
        return taken

    @property
    def use(self) -> CacheGroupUse:
        return CacheGroupUse(
            window=self.group.window or 0,
            layers=len(self.group.layers),
            pages=self.pool.pages,
            free=self.pool.free,
            cached=self.pool.idle,
            quarantined=self.pool.quarantined,
        )


class PagedCache:
    """All pages of one runtime. Owner thread only.

    Args:
        config: sizes.
        geometry: of the pages.
        dtype: of K and V.
        device: where they lie.

    Attributes:
        groups: its pages.
        places: of each layer: its group, and its place in it.
        hit_tokens: tokens of prompts that were found, and not computed again.
        epoch: how often prefixes were forgotten: pages of an earlier one are not kept for prompts to come.

    Raises:
        DeviceError: OUT_OF_MEMORY.

    """

    def __init__(self, config: ModelConfig, geometry: CacheGeometry, dtype: torch.dtype, device: torch.device) -> None:
        self.geometry = geometry
        self.hit_tokens = 0
        self.epoch = 0
        self._holders: list[BlockTable] = []
        size = geometry.page_tokens
        try:
            self.groups = tuple(
                GroupPages(
                    group,
                    _states(
                        (len(group.layers), group.pages, 2, config.kv_heads, size, config.head_dim), dtype, device
                    ),
                )
                for group in geometry.groups
            )  # fmt: skip
        except (RuntimeError, MemoryError) as error:
            raise DeviceError(DeviceFault.OUT_OF_MEMORY, f"{geometry.nbytes} bytes of K/V pages: {error}") from error
        places = {
            layer: (index, at) for index, group in enumerate(geometry.groups) for at, layer in enumerate(group.layers)
        }
        self.places = tuple(places[layer] for layer in range(config.layers))

    def join(self, table: BlockTable) -> None:
        """A block table holds pages from now on, or may."""
        self._holders.append(table)

    def leave(self, table: BlockTable) -> None:
        assert not any(table.held), "a table that leaves holds pages"
        self._holders.remove(table)

    def has_room(self, *tokens: int) -> bool:
        """Whether sequences could now have pages for so many tokens each."""
        most = self.geometry.most_pages
        return all(pages.available >= sum(most(pages.group, item) for item in tokens) for pages in self.groups)

    def lacking(self, tokens: int) -> str:
        """Why a sequence of so many tokens could never fit, or empty."""
        for pages in self.groups:
            needed, there = self.geometry.most_pages(pages.group, tokens), pages.pool.pages - pages.pool.quarantined
            if needed > there:
                size = self.geometry.page_tokens
                return f"{tokens} tokens need {needed} pages of {size} tokens each, the cache has {there}"
        return ""

    def find_prefix(self, keys: Sequence[bytes]) -> list[list[int]]:
        """The longest known beginning of a prompt, in the order of its page keys.

        Returns:
            For each group as many pages as are known, each held once more; -1 stands for those that the group's window
            has passed.

        """
        count = next((at for at in range(self._run(keys), 0, -1) if self._is_known(keys[:at])), 0)
        found = []
        for pages in self.groups:
            first = self._first_page(pages, count)
            found.append([-1] * first + [pages.prefixes.hold(key) for key in keys[first:count]])
            for key in reversed(keys[first:count]):
                pages.prefixes.touch(key)
        self.hit_tokens += count * self.geometry.page_tokens
        return found

    def keep_prefix(self, key: bytes, pages: Sequence[int]) -> None:
        """Keep one full page for prompts to come, of each group that still has it (-1: its window has passed)."""
        for group, page in zip(self.groups, pages, strict=True):
            if page >= 0:
                group.prefixes.add(key, page)

    def forget_prefixes(self) -> None:
        """Nothing that was computed until now will be found again."""
        self.epoch += 1
        for pages in self.groups:
            pages.prefixes.clear()

    @property
    def use(self) -> CacheUse:
        geometry = self.geometry
        return CacheUse(geometry.page_tokens, geometry.nbytes, tuple(item.use for item in self.groups), self.hit_tokens)

    def check_integrity(self) -> None:
        """Each page is free, quarantined, or held as often as tables and prefixes say. Raises AssertionError."""
        for index, pages in enumerate(self.groups):
            held = chain.from_iterable(table.held[index] for table in self._holders)
            pages.pool.check_integrity(chain(held, pages.prefixes.pages))
        for table in self._holders:
            table.check_integrity()

    def _first_page(self, pages: GroupPages, count: int) -> int:
        """The first page that a token behind so many full ones still looks at."""
        return pages.group.first_needed(count * self.geometry.page_tokens) // self.geometry.page_tokens

    def _run(self, keys: Sequence[bytes]) -> int:
        """How many leading pages every group without a window knows."""
        whole = [pages.prefixes for pages in self.groups if pages.group.window is None]
        known = (all(prefixes.find(key) is not None for prefixes in whole) for key in keys)
        return next((at for at, there in enumerate(known) if not there), len(keys))

    def _is_known(self, keys: Sequence[bytes]) -> bool:
        """Whether every group with a window still has what a token behind these pages looks at."""
        windowed = [pages for pages in self.groups if pages.group.window is not None]
        return all(
            pages.prefixes.find(key) is not None
            for pages in windowed
            for key in keys[self._first_page(pages, len(keys)) :]
        )


def _memory_ahead(states: torch.Tensor) -> MemoryAhead:
    layers = [layer.view(torch.uint8).flatten().numpy() for layer in states]
    return MemoryAhead(layers, layers[0].nbytes // states.shape[1])


def _states(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for pages, content undefined; on the host in large pages of memory."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(aligned_bytes(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
