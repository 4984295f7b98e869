"""Runtimes whose programs keep the K/V to themselves. Free of torch."""

from __future__ import annotations

from rowlock.bindings.device import CacheUse


class Unpaged:
    """What a :class:`rowlock.bindings.device.Runtime` without a paged cache says of it.

    A sequence has its K/V from the beginning, or waits for the programs; nothing is shared, kept for later or taken in.
    """

    @property
    def cache(self) -> CacheUse:
        return CacheUse()

    @property
    def importer(self) -> None:
        return None

    def has_room(self, *tokens: int) -> bool:
        del tokens
        return True

    def forget(self) -> None:
        """Nothing is kept of earlier prompts."""
