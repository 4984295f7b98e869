"""How the K/V of a model is cut into pages. Free of torch.

::

    config.windows  ──>  cache groups: layers that look equally far      (all of the sequence; a window of it)
                         each: so many pages, [layers, pages, 2, kv_heads, page_tokens, head_dim]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.config import ModelConfig

PAGE_TOKENS: Final = 32
SPAN_TOKENS: Final = 128
"""The most tokens that one step adds to a sequence."""
SEQUENCES: Final = 8
"""Sequences at their longest that the default is enough for."""
MEMORY_SHARE: Final = 4
"""The default takes at most one such part of the memory that is free."""


@dataclass(frozen=True)
class CacheLimits:
    """What is asked for.

    Attributes:
        cache_bytes: of all pages; 0 leaves it to the model and the memory.
        page_tokens: of one page; what is longer than the context means the whole context.

    """

    cache_bytes: int = 0
    page_tokens: int = PAGE_TOKENS


DEFAULT_LIMITS: Final = CacheLimits()


@dataclass(frozen=True)
class CacheGroup:
    """Layers that look equally far, and the pages that they share out.

    Attributes:
        window: positions that a token may look at, its own included; None: all.
        layers: in the model's order.
        pages: that there are.

    """

    window: int | None
    layers: tuple[int, ...]
    pages: int

    def first_needed(self, length: int) -> int:
        """The first position that the token behind ``length`` others still looks at."""
        return 0 if self.window is None else max(0, length - self.window + 1)


@dataclass(frozen=True)
class CacheGeometry:
    """Pages of a model.

    Attributes:
        page_tokens: positions of one page.
        token_bytes: K/V of one position in one layer.

    """

    page_tokens: int
    token_bytes: int
    groups: tuple[CacheGroup, ...]

    @property
    def nbytes(self) -> int:
        return sum(len(group.layers) * group.pages for group in self.groups) * self.page_tokens * self.token_bytes

    def pages_of(self, tokens: int) -> int:
        """Pages of one group that hold so many positions."""
        return -(-tokens // self.page_tokens)

    def most_pages(self, group: CacheGroup, tokens: int) -> int:
        """The most pages of a group that a sequence holds on its way to so many positions."""
        if group.window is None:
            return self.pages_of(tokens)
        return min(self.pages_of(tokens), self.pages_of(group.window + SPAN_TOKENS) + 1)


def plan_geometry(config: ModelConfig, value_bytes: int, limits: CacheLimits, free_bytes: int) -> CacheGeometry:
    """The pages of a model.

    Args:
        config: sizes, and how far each layer looks.
        value_bytes: of one number of K or V.
        limits: what is asked for.
        free_bytes: memory that the default may take a share of.

    Raises:
        DeviceError: OUT_OF_MEMORY, when ``cache_bytes`` is less than one page of each layer.

    """
    page_tokens = min(limits.page_tokens, config.context)
    longest = _geometry(config, value_bytes, page_tokens, SEQUENCES * -(-config.context // page_tokens))
    wanted = limits.cache_bytes or min(longest.nbytes, free_bytes // MEMORY_SHARE)
    low, high = 0, SEQUENCES * wanted // (page_tokens * longest.token_bytes) + 1
    if not limits.cache_bytes:
        high = min(high, longest.groups[0].pages)
    while low < high:
        middle = (low + high + 1) // 2
        fits = _geometry(config, value_bytes, page_tokens, middle).nbytes <= wanted
        low, high = (middle, high) if fits else (low, middle - 1)
    if low == 0:
        least = _geometry(config, value_bytes, page_tokens, 1).nbytes
        raise DeviceError(
            DeviceFault.OUT_OF_MEMORY,
            f"serving.cache_bytes: {wanted} bytes hold no page of {page_tokens} tokens, which takes {least}",
        )
    return _geometry(config, value_bytes, page_tokens, low)


def _geometry(config: ModelConfig, value_bytes: int, page_tokens: int, pages: int) -> CacheGeometry:
    """With so many pages of the group that looks furthest; a window needs no more than its sequences can hold."""
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(config.windows):
        # a window of the whole context hides nothing
        by_window.setdefault(None if window is None or window >= config.context else window, []).append(layer)
    geometry = CacheGeometry(page_tokens, 2 * config.kv_heads * config.head_dim * value_bytes, ())
    groups = []
    for window in sorted(by_window, key=lambda item: item is not None):
        group = CacheGroup(window, tuple(by_window[window]), pages)
        most = SEQUENCES * geometry.most_pages(group, config.context)
        groups.append(group if window is None else CacheGroup(window, group.layers, min(pages, most)))
    return CacheGeometry(page_tokens, geometry.token_bytes, tuple(groups))
