"""Which K/V of a prompt has arrived: layer by layer, position by position, each exactly once."""

from __future__ import annotations

from bisect import bisect_left, insort

from rowlock.daemon.prefill.protocol.frames import Span
from rowlock.daemon.prefill.protocol.geometry import DTYPE_CODES, RequestLayout


class SpanRefusedError(Exception):
    """A span that cannot be part of what was asked for; the message names the field."""


class Coverage:
    """What has been announced of one prompt.

    Args:
        layout: what was asked for.
        generation: under which.

    """

    def __init__(self, layout: RequestLayout, generation: int) -> None:
        self.spans = 0
        self._layout = layout
        self._generation = generation
        self._ranges: list[list[tuple[int, int]]] = [[] for _ in range(layout.geometry.layers)]  # of each layer, sorted

    def add(self, span: Span) -> None:
        """Take note of a span.

        Raises:
            SpanRefusedError: it is of something else, out of bounds, or was there already. Nothing is noted.

        """
        self._check_shape(span)
        self._check_bounds(span)
        new = (span.token, span.token_stop)
        for layer in range(span.layer, span.layer_stop):
            there = self._ranges[layer]
            at = bisect_left(there, new)
            for first, stop in there[max(0, at - 1) : at + 1]:
                if span.token < stop and first < span.token_stop:
                    raise SpanRefusedError(
                        f"span: positions {span.token} to {span.token_stop} of layer {layer} "
                        f"overlap {first} to {stop}, which came before"
                    )
        for layer in range(span.layer, span.layer_stop):
            insort(self._ranges[layer], new)
        self.spans += 1

    def missing(self) -> str:
        """What has not been announced, or empty."""
        for layer, ranges in enumerate(self._ranges):
            wanted = self._layout.tokens - self._layout.first(layer)
            there = sum(stop - first for first, stop in ranges)
            if there != wanted:
                return f"layer {layer} has {there} of {wanted} positions"
        return ""

    def _check_shape(self, span: Span) -> None:
        geometry = self._layout.geometry
        wanted = {
            "generation": (span.generation, self._generation),
            "dtype": (span.dtype, DTYPE_CODES[geometry.dtype]),
            "kv_heads": (span.kv_heads, geometry.kv_heads),
            "head_dim": (span.head_dim, geometry.head_dim),
        }
        for name, (found, right) in wanted.items():
            if found != right:
                raise SpanRefusedError(f"span.{name} is {found}, wanted {right}")

    def _check_bounds(self, span: Span) -> None:
        geometry = self._layout.geometry
        if span.layer_stop > geometry.layers:
            raise SpanRefusedError(f"span.layer_stop is {span.layer_stop}, there are {geometry.layers} layers")
        if len({geometry.group_of[layer] for layer in range(span.layer, span.layer_stop)}) != 1:
            raise SpanRefusedError(f"span: layers {span.layer} to {span.layer_stop} are not of one cache group")
        first = self._layout.first(span.layer)
        if not first <= span.token < span.token_stop <= self._layout.tokens:
            raise SpanRefusedError(
                f"span: positions {span.token} to {span.token_stop} of layer {span.layer}; "
                f"wanted are {first} to {self._layout.tokens}"
            )
