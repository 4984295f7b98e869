"""The decoder as a program of fixed shapes: what is exported, compiled and run on a card.

::

    tokens [T], select [1, T]          ─┐
    cos, sin [T, head_dim]              │
    mask [T, capacity + T]              ├─>  logits [1, vocab]
    keys_values [L, 2, kv, capacity, d] │    states [L, 2, kv, T, d]: the K/V of these tokens
    every parent's weights, in order   ─┘

Weights and K/V are inputs like any other: whoever changes bytes of them changes nothing of the
program. The operations and their order are those of :mod:`rowlock.bindings.model.decoder`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from blake3 import blake3

from rowlock.bindings.model.attention import rope_frequencies
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.rngd.shape import ProgramShape

UNSEEN: Final = -1e30
"""Added to the score of a position that may not be seen: its weight becomes exactly 0."""


def source_digest() -> str:
    """BLAKE3 of this file: another program text makes another artifact."""
    return blake3(Path(__file__).read_bytes()).hexdigest()


class DecoderProgram(torch.nn.Module):
    """One forward pass; see the module's text.

    Args:
        config: sizes.
        parents: names of the weights, in the order in which they are passed.

    """

    def __init__(self, config: ModelConfig, parents: tuple[str, ...]) -> None:
        super().__init__()
        self._config = config
        self._parents = parents

    def forward(
        self,
        tokens: torch.Tensor,
        select: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor,
        keys_values: torch.Tensor,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config, weight = self._config, dict(zip(self._parents, weights, strict=True))
        hidden = F.embedding(tokens, weight["embed"])
        states = []
        for layer in range(config.layers):
            normed = _norm(hidden, weight[f"{layer}.input_norm"], config.norm_eps)
            qkv = F.linear(normed, weight[f"{layer}.qkv"]).view(tokens.shape[0], -1, config.head_dim).transpose(0, 1)
            query, key, value = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads])
            query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
            states.append(torch.stack((key, value)))
            attended = self._attended(query, keys_values[layer], states[-1], mask)
            hidden = hidden + F.linear(attended, weight[f"{layer}.o"])
            normed = _norm(hidden, weight[f"{layer}.post_norm"], config.norm_eps)
            gate, up = F.linear(normed, weight[f"{layer}.gate_up"]).chunk(2, dim=-1)
            hidden = hidden + F.linear(F.silu(gate) * up, weight[f"{layer}.down"])
        if tokens.shape[0] > 1:
            hidden = torch.matmul(select, hidden)
        head = weight["embed" if config.tied else "head"]
        return F.linear(_norm(hidden, weight["norm"], config.norm_eps), head), torch.stack(states)

    def _attended(
        self, query: torch.Tensor, before: torch.Tensor, now: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """``[T, heads * head_dim]``; the query heads of one K/V head go together, so that K/V is not repeated."""
        config, count = self._config, query.shape[1]
        keys, values = torch.cat((before, now), dim=2)
        grouped = query.reshape(config.kv_heads, -1, count, config.head_dim)
        scores = torch.matmul(grouped, keys[:, None].transpose(-1, -2)).float() * config.head_dim**-0.5
        shares = (scores + mask).softmax(-1).to(query.dtype)
        mixed = torch.matmul(shares, values[:, None]).reshape(config.heads, count, config.head_dim)
        return mixed.transpose(0, 1).reshape(count, -1)


class StepInputs:
    """The inputs of a step that are not resident, made on the host."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._frequencies = rope_frequencies(config.head_dim, config.rope)

    def of(self, shape: ProgramShape, tokens: list[int], past: int) -> tuple[torch.Tensor, ...]:
        """``tokens, select, cos, sin, mask`` for at most ``shape.length`` tokens behind ``past`` others.

        A step that is not full repeats its first token: what is computed for those is thrown away.
        """
        count, length = len(tokens), shape.length
        assert 0 < count <= length, f"{count} tokens in a step of {length}"
        assert past + count <= shape.capacity, "the sequence is full"
        padded = torch.tensor(tokens + tokens[:1] * (length - count))
        select = torch.zeros(1, length, dtype=self._dtype)
        select[0, count - 1] = 1
        angles = torch.outer(torch.arange(past, past + length, dtype=torch.float32), self._frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        mask = torch.full((length, shape.capacity + length), UNSEEN)
        mask[:, :past] = 0
        mask[:, shape.capacity :] = torch.full((length, length), UNSEEN).triu(diagonal=1)
        return padded, select, angles.cos().to(self._dtype), angles.sin().to(self._dtype), mask

    def example(self, config: ModelConfig, shape: ProgramShape) -> tuple[torch.Tensor, ...]:
        """Inputs of the right shapes, K/V included: what an export needs."""
        return (*self.of(shape, [0], 0), new_keys_values(config, shape, self._dtype))


def new_keys_values(config: ModelConfig, shape: ProgramShape, dtype: torch.dtype) -> torch.Tensor:
    """``[layers, 2, kv_heads, capacity, head_dim]`` of zeros: finite, since what is masked is still multiplied."""
    return torch.zeros(config.layers, 2, config.kv_heads, shape.capacity, config.head_dim, dtype=dtype)


def _norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden.dtype)


def _rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-right, left), dim=-1) * sin
