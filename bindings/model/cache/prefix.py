"""Full pages of prompts, kept for the next prompt that begins alike. Free of torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from rowlock.bindings.model.cache.pages import PagePool


def page_keys(tokens: NDArray[np.int64], page_tokens: int) -> Iterator[bytes]:
    """A key for each full page: a digest of its tokens and of all before it."""
    key = b""
    for stop in range(page_tokens, len(tokens) + 1, page_tokens):
        hasher = blake3(key, derive_key_context="rowlock v1 prefix page")
        hasher.update(tokens[stop - page_tokens : stop].tobytes())
        key = hasher.digest()
        yield key


class PrefixIndex:
    """Pages of one cache group by key, the one found last at the end. It holds each of them once.

    Args:
        pool: of the group.

    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._pages: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def pages(self) -> list[int]:
        return list(self._pages.values())

    def find(self, key: bytes) -> int | None:
        return self._pages.get(key)

    def hold(self, key: bytes) -> int:
        """A page that is there, held once more."""
        page = self._pages[key]
        self._pool.share(page)
        return page

    def touch(self, key: bytes) -> None:
        """Keep it longer than those not touched since."""
        self._pages.move_to_end(key)

    def add(self, key: bytes, page: int) -> None:
        """Keep a page that its caller holds; one that is there already under this key stays."""
        if key not in self._pages:
            self._pool.keep(page)
            self._pages[key] = page

    def evict(self, count: int) -> None:
        """Let go of pages that nobody else holds, the oldest first, until so many are free or none is left."""
        wanted = count - self._pool.free
        idle = (key for key, page in self._pages.items() if self._pool.is_idle(page))
        for key in list(islice(idle, max(0, wanted))):
            self._pool.drop(self._pages.pop(key))

    def clear(self) -> None:
        while self._pages:
            self._pool.drop(self._pages.popitem()[1])
