"""Which pages are free, and how often each of the others is held. Free of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class PagesShortError(Exception):
    """There are not as many free pages as were asked for."""


class PagePool:
    """The pages of one cache group, by number.

    ::

        free ──take──> held once ──share──> held more often
          ^────────give_back────┘  └─quarantine─> never used again

    Args:
        pages: how many there are.

    Attributes:
        idle: pages that nobody holds but who keeps them for later.

    """

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages))[::-1]
        self._holders = [0] * pages
        self._kept: set[int] = set()
        self._quarantined: set[int] = set()
        self.idle = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def quarantined(self) -> int:
        return len(self._quarantined)

    def take(self, count: int) -> list[int]:
        """So many free pages, each held once. Raises PagesShortError, and then takes none."""
        if count > len(self._free):
            raise PagesShortError(f"{count} pages are needed, {len(self._free)} of {self.pages} are free")
        taken = sorted(self._free.pop() for _ in range(count))  # what lies together is copied together
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, page: int) -> None:
        """Hold a page once more that is held already."""
        assert self._holders[page] > 0, f"page {page} is free"
        self.idle -= self.is_idle(page)
        self._holders[page] += 1

    def give_back(self, page: int) -> None:
        """Hold a page once less; it is free when nobody holds it."""
        assert self._holders[page] > 0, f"page {page} is free"
        self._holders[page] -= 1
        self.idle += self.is_idle(page)
        if not self._holders[page]:
            self._free.append(page)

    def keep(self, page: int) -> None:
        """Hold a page once more, for later."""
        assert page not in self._kept, f"page {page} is kept already"
        self.share(page)
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """Keep a page no more."""
        self.idle -= self.is_idle(page)
        self._kept.remove(page)
        self._holders[page] -= 1
        if not self._holders[page]:
            self._free.append(page)

    def is_idle(self, page: int) -> bool:
        """Whether a page is kept for later, and held by nobody else."""
        return self._holders[page] == 1 and page in self._kept

    def quarantine(self, page: int) -> None:
        """Let go of a page that only the caller holds, never to be used again."""
        assert self._holders[page] == 1, f"page {page} has {self._holders[page]} holders"
        assert page not in self._kept, f"page {page} is kept for later"
        self._holders[page] = 0
        self._quarantined.add(page)

    def check_integrity(self, held: Iterable[int]) -> None:
        """Every page is free, quarantined, or held exactly as often as ``held`` names it. Raises AssertionError."""
        named = Counter(held)
        for page, holders in enumerate(self._holders):
            assert named[page] == holders, f"page {page} is named {named[page]} times and held {holders} times"
        idle = sum(self.is_idle(page) for page in self._kept)
        assert self.idle == idle, f"{idle} pages are idle, {self.idle} were counted"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        unheld = {page for page, holders in enumerate(self._holders) if not holders}
        assert unheld == free | self._quarantined, f"pages {unheld ^ (free | self._quarantined)} are lost"
        assert not free & self._quarantined, "a quarantined page is free"
