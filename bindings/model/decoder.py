"""The decoder over resident weights.

The weights are the resident allocations themselves: nothing here keeps a derived copy
(scaled, transposed, prepacked) that a row write would miss. The operations and their
order follow those of the family's class in transformers, so that the logits can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from rowlock.bindings.model.attention import attend, rope_frequencies, rotate
from rowlock.bindings.model.cache.table import BlockTable
from rowlock.bindings.model.config import ModelConfig

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows ``[M, K]`` times weights ``[N, K]``, as ``[M, N]``."""


@dataclass(frozen=True)
class Span:
    """Tokens ``[T]`` of one sequence, which follow those of its block table.

    Attributes:
        prompt: length of the prompt that they are of; 1 for what follows it.

    """

    tokens: torch.Tensor
    table: BlockTable
    prompt: int = 1


class Programs(Protocol):
    """What computes a model's steps.

    Attributes:
        replayed: tokens behind a prompt that may be computed again in one span, with the bits that they had one by one.

    """

    @property
    def replayed(self) -> int: ...

    def settled(self, prompt: int) -> int:
        """How many leading tokens of a prompt of this length have K/V with the same bits in every longer prompt."""
        ...

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits ``[len(spans), vocab]`` of the last token of each span; their K/V is added to their tables."""
        ...

    def forward_layers(self, spans: Sequence[Span], layers: range, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """A step piece by piece: K/V of a layer can be read from the tables as soon as its piece has returned.

        Args:
            spans: as for :meth:`forward`, the same for all pieces of a step.
            layers: consecutive ones; each piece goes on where the one before it ended.
            hidden: what the piece before it returned; None before layer 0.

        Returns:
            States ``[T, hidden]`` of all tokens in order; of the last piece, logits. Only that one advances the tables.

        """
        ...


class Decoder:
    """Forward passes of one model, over several sequences at once.

    What one sequence gets does not depend on which others are in the batch.

    Args:
        config: sizes.
        weights: resident tensors ``[rows, columns]`` by parent name, all of one dtype and on one device. Who only runs
            layers needs theirs only.
        linear: multiplies rows with weights.

    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], linear: Linear = F.linear) -> None:
        self.config = config
        self._weights = weights
        self._linear = linear
        self._any = next(iter(weights.values()))
        self._frequencies = [rope_frequencies(config.head_dim, rope).to(self.device) for rope in config.ropes]
        self._embed_scale = embed_scale(config, self.dtype).to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._any.dtype

    @property
    def device(self) -> torch.device:
        return self._any.device

    @property
    def replayed(self) -> int:
        """One: torch adds in another order for another number of rows."""
        return 1

    def settled(self, prompt: int) -> int:
        """None: the bits of each depend on how many there are."""
        del prompt
        return 0

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], last_only: bool = True) -> torch.Tensor:
        """Logits of the spans; their K/V is added to their tables.

        Returns:
            ``[len(spans), vocab]`` for the last token of each, or ``[T, vocab]`` for all in order,
            in the weights' dtype.

        """
        return self.forward_layers(spans, range(self.config.layers), last_only=last_only)

    @torch.inference_mode()
    def forward_layers(
        self,
        spans: Sequence[Span],
        layers: range,
        hidden: torch.Tensor | None = None,
        last_only: bool = True,
    ) -> torch.Tensor:
        """See :class:`Programs`; ``last_only`` as for :meth:`forward`."""
        if hidden is None:
            hidden = self.embed(torch.cat([span.tokens for span in spans]))
        hidden = self.run_layers(spans, layers, hidden)
        if layers.stop < self.config.layers:
            return hidden
        for span in spans:
            span.table.advance(len(span.tokens))
        if last_only:
            hidden = hidden[list(accumulate((len(span.tokens) for span in spans), initial=-1))[1:]]
        return self.head(hidden)

    @torch.inference_mode()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """States ``[T, hidden]`` of tokens ``[T]``, before layer 0."""
        hidden = F.embedding(tokens.to(self.device), self._weights["embed"])
        return hidden * self._embed_scale if self.config.traits.scaled_embeddings else hidden

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits ``[T, vocab]`` from states ``[T, hidden]`` behind the last layer."""
        return self._linear(self._norm("norm", hidden), self._weights["embed" if self.config.tied else "head"])

    @torch.inference_mode()
    def run_layers(self, spans: Sequence[Span], layers: range, hidden: torch.Tensor) -> torch.Tensor:
        """States ``[T, hidden]`` behind some layers, from those before them. The tables do not advance."""
        rotations = self.rotations(spans)
        for layer in layers:
            rotation = rotations[self.config.rope_index(layer)]
            normed = self._norm(f"{layer}.input_norm", hidden)
            hidden = hidden + self._added(layer, "o", self._attended(layer, normed, rotation, spans))
            normed = self._norm(f"{layer}.post_norm", hidden)
            hidden = hidden + self._added(layer, "down", self._gated(layer, normed))
        return hidden

    def _norm(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm of the last dimension, in float32."""
        weight, wide = self._weights[name], hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.norm_eps)
        if self.config.traits.norms_from_one:
            return (wide * (1.0 + weight.float())).to(hidden.dtype)
        return weight * wide.to(hidden.dtype)

    def _added(self, layer: int, product: str, hidden: torch.Tensor) -> torch.Tensor:
        """What ``o`` or ``down`` adds to the hidden states."""
        added = self._linear(hidden, self._weights[f"{layer}.{product}"])
        return self._norm(f"{layer}.{product}_norm", added) if self.config.traits.product_norms else added

    def _attended(
        self, layer: int, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], spans: Sequence[Span]
    ) -> torch.Tensor:
        config = self.config
        qkv = self._linear(hidden, self._weights[f"{layer}.qkv"]).view(len(hidden), -1, config.head_dim)
        query, key, value = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        if config.traits.head_norms:
            query, key = self._norm(f"{layer}.q_norm", query), self._norm(f"{layer}.k_norm", key)
        query, key = rotate(query, rotation), rotate(key, rotation)
        attended = torch.empty_like(query)
        start = 0
        for span in spans:
            rows = slice(start, start := start + len(span.tokens))
            keys, values = span.table.append(layer, key[rows].transpose(0, 1), value[rows].transpose(0, 1))
            attended[rows] = attend(query[rows], keys, values, config.query_scale, config.windows[layer])
        return attended.view(len(hidden), -1)

    def _gated(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self._linear(hidden, self._weights[f"{layer}.gate_up"]).chunk(2, dim=-1)
        return activation(self.config)(gate) * up

    def rotations(self, spans: Sequence[Span]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each of the config's ropes: cosines and sines ``[T, 1, head_dim]`` of each token's position."""
        positions = torch.cat(
            [torch.arange(span.table.length, span.table.length + len(span.tokens)) for span in spans]
        ).to(self.device, torch.float32)
        angles = [torch.outer(positions, frequencies) for frequencies in self._frequencies]
        both = [torch.cat((half, half), dim=-1)[:, None] for half in angles]
        return [(angle.cos().to(self.dtype), angle.sin().to(self.dtype)) for angle in both]


def embed_scale(config: ModelConfig, dtype: torch.dtype) -> torch.Tensor:
    """What embeddings are multiplied by; rounded to the weights' dtype before, as Gemma 3 does."""
    return torch.tensor(config.hidden**0.5 if config.traits.scaled_embeddings else 1.0, dtype=dtype)


def activation(config: ModelConfig) -> Callable[[torch.Tensor], torch.Tensor]:
    """Of the gate."""
    if config.traits.activation == "silu":
        return F.silu
    return partial(F.gelu, approximate="tanh")
