"""What K/V looks like, and where each piece of it lies in the memory of a request.

::

    memory of one request:  layer 0 | layer 1 | ... | last layer | padding to 64 bytes | logits [vocab]
    of one layer:           [2, kv_heads, tokens - first, head_dim]: keys, then values; positions from `first` on
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

DTYPES: Final = {"BF16": 2, "F16": 2, "F32": 4}
"""Names of dtypes, and bytes of one value."""
DTYPE_CODES: Final = {"BF16": 1, "F16": 2, "F32": 3}
"""As they stand in frames."""
ALIGN: Final = 64


@dataclass(frozen=True)
class Geometry:
    """The K/V of a model.

    Attributes:
        dtype: of K/V and of logits: a key of :data:`DTYPES`.
        kv_heads: of one layer.
        head_dim: values of one head.
        vocab: values of the logits.
        windows: of each layer, how many positions a token may look at, its own included; None is all of them.

    """

    dtype: str
    kv_heads: int
    head_dim: int
    vocab: int
    windows: tuple[int | None, ...]

    @property
    def layers(self) -> int:
        return len(self.windows)

    @cached_property
    def groups(self) -> tuple[int | None, ...]:
        """The windows that there are, in the order of their first layers: one cache group each."""
        return tuple(dict.fromkeys(self.windows))

    @cached_property
    def group_of(self) -> tuple[int, ...]:
        """The cache group of each layer."""
        return tuple(self.groups.index(window) for window in self.windows)

    @property
    def token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * DTYPES[self.dtype]

    def runs(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Layers ``first`` to ``stop`` as the fewest ranges whose layers are of one group each."""
        edges = [layer for layer in range(first + 1, stop) if self.group_of[layer] != self.group_of[layer - 1]]
        return list(zip([first, *edges], [*edges, stop], strict=True)) if stop > first else []


@dataclass(frozen=True)
class RequestLayout:
    """The memory of one request.

    Attributes:
        geometry: of the model.
        tokens: length of the prompt.
        firsts: of each group, the first position whose K/V is wanted; ``tokens`` where none is.

    """

    geometry: Geometry
    tokens: int
    firsts: tuple[int, ...]

    def first(self, layer: int) -> int:
        """The first position that a layer's region holds."""
        return self.firsts[self.geometry.group_of[layer]]

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where the region of each layer begins, in bytes; one more for where the last one ends."""
        result = [0]
        for layer in range(self.geometry.layers):
            result.append(result[-1] + (self.tokens - self.first(layer)) * self.geometry.token_bytes)
        return tuple(result)

    @property
    def logits_offset(self) -> int:
        return -(-self.offsets[-1] // ALIGN) * ALIGN

    @property
    def logits_bytes(self) -> int:
        return self.geometry.vocab * DTYPES[self.geometry.dtype]

    @property
    def nbytes(self) -> int:
        return self.logits_offset + self.logits_bytes
