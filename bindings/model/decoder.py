"""The Llama decoder over resident weights.

The weights are the resident allocations themselves: nothing here keeps a derived copy
(scaled, transposed, prepacked) that a row write would miss. The operations and their
order follow transformers' LlamaForCausalLM, so that the logits can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from rowlock.bindings.model.config import ModelConfig, RopeScaling
from rowlock.bindings.model.keys_values import KeysValues

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows ``[M, K]`` times weights ``[N, K]``, as ``[M, N]``."""


@dataclass(frozen=True)
class Span:
    """Tokens ``[T]`` of one sequence, which follow what its cache holds.

    Attributes:
        prompt: length of the prompt that they are of; 1 for what follows it.

    """

    tokens: torch.Tensor
    cache: KeysValues
    prompt: int = 1


class Decoder:
    """Forward passes of one model, over several sequences at once.

    What one sequence gets does not depend on which others are in the batch.

    Args:
        config: sizes.
        weights: resident tensors ``[rows, columns]`` by parent name, all of one dtype.
        linear: multiplies rows with weights.

    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], linear: Linear = F.linear) -> None:
        self.config = config
        self._weights = weights
        self._linear = linear
        self._head = weights["embed" if config.tied else "head"]
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self._frequencies = frequencies.to(self.device)

    @property
    def dtype(self) -> torch.dtype:
        return self._head.dtype

    @property
    def device(self) -> torch.device:
        return self._head.device

    def new_cache(self, capacity: int) -> KeysValues:
        config = self.config
        return KeysValues(config.layers, config.kv_heads, config.head_dim, capacity, self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span], last_only: bool = True) -> torch.Tensor:
        """Logits of the spans; their K/V is added to their caches.

        Returns:
            ``[len(spans), vocab]`` for the last token of each, or ``[T, vocab]`` for all in order,
            in the weights' dtype.

        """
        config, weights = self.config, self._weights
        hidden = F.embedding(torch.cat([span.tokens for span in spans]).to(self.device), weights["embed"])
        rotation = self.rotation(spans)
        for layer in range(config.layers):
            normed = _rms_norm(hidden, weights[f"{layer}.input_norm"], config.norm_eps)
            hidden = hidden + self._attention(layer, normed, rotation, spans)
            normed = _rms_norm(hidden, weights[f"{layer}.post_norm"], config.norm_eps)
            hidden = hidden + self._mlp(layer, normed)
        for span in spans:
            span.cache.length += len(span.tokens)
        if last_only:
            hidden = hidden[list(accumulate((len(span.tokens) for span in spans), initial=-1))[1:]]
        return self._linear(_rms_norm(hidden, weights["norm"], config.norm_eps), self._head)

    def _attention(
        self, layer: int, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], spans: Sequence[Span]
    ) -> torch.Tensor:
        config = self.config
        qkv = self._linear(hidden, self._weights[f"{layer}.qkv"]).view(len(hidden), -1, config.head_dim)
        query, key, value = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        query, key = _rotate(query, rotation), _rotate(key, rotation)
        attended = torch.empty_like(query)
        start = 0
        for span in spans:
            rows = slice(start, start := start + len(span.tokens))
            keys, values = span.cache.append(layer, key[rows].transpose(0, 1), value[rows].transpose(0, 1))
            attended[rows] = attend(query[rows], keys, values)
        return self._linear(attended.view(len(hidden), -1), self._weights[f"{layer}.o"])

    def _mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self._linear(hidden, self._weights[f"{layer}.gate_up"]).chunk(2, dim=-1)
        return self._linear(F.silu(gate) * up, self._weights[f"{layer}.down"])

    def rotation(self, spans: Sequence[Span]) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines ``[T, 1, head_dim]`` of each token's position."""
        positions = torch.cat(
            [torch.arange(span.cache.length, span.cache.length + len(span.tokens)) for span in spans]
        ).to(self.device, torch.float32)
        angles = torch.outer(positions, self._frequencies)
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last T positions of one sequence.

    Args:
        query: ``[T, heads, head_dim]``.
        keys: ``[kv_heads, positions, head_dim]``.
        values: like ``keys``.

    Returns:
        ``[T, heads, head_dim]``.

    """
    count, positions = len(query), keys.shape[1]
    mask = _causal_mask(positions - count, count, query.device)
    attended: torch.Tensor = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None and count > 1,
        enable_gqa=query.shape[1] != keys.shape[0],
    )
    return attended[0].transpose(0, 1)


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Rotary frequencies ``[head_dim / 2]``, float32.

    Source: RoFormer (arXiv 2104.09864); the ``llama3`` scaling is that of Llama 3.1's
    reference code: long wavelengths are divided by ``factor``, short ones kept, those
    between interpolated.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if scaling is None:
        return frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (scaling.original_context / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > scaling.original_context / low, frequencies / scaling.factor, frequencies)
    medium = (wavelengths <= scaling.original_context / low) & (wavelengths >= scaling.original_context / high)
    return torch.where(medium, between, scaled)


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm in float32, rounded before the weight is applied (as Llama does)."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden.dtype)


def _rotate(states: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply the rotary embedding to ``[T, heads, head_dim]``."""
    cos, sin = rotation
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-right, left), dim=-1) * sin


def _causal_mask(past: int, count: int, device: torch.device) -> torch.Tensor | None:
    """``[count, past + count]``, True where a token may look; None where no mask tensor is needed."""
    if past == 0 or count == 1:
        return None
    return torch.ones(count, past + count, dtype=torch.bool, device=device).tril(diagonal=past)
