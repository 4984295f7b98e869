"""The Llama decoder over resident weights.

The weights are the resident allocations themselves: nothing here keeps a derived copy
(scaled, transposed, prepacked) that a row write would miss. The operations and their
order follow transformers' LlamaForCausalLM, so that the logits can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from rowlock.bindings.model.config import ModelConfig, RopeScaling
from rowlock.bindings.model.keys_values import KeysValues


class Decoder:
    """Forward passes of one model.

    Args:
        config: sizes.
        weights: resident tensors ``[rows, columns]`` by parent name, all of one dtype.

    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor]) -> None:
        self.config = config
        self._weights = weights
        self._head = weights["embed" if config.tied else "head"]
        self._frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)

    @property
    def dtype(self) -> torch.dtype:
        return self._head.dtype

    def new_cache(self, capacity: int) -> KeysValues:
        config = self.config
        return KeysValues(config.layers, config.kv_heads, config.head_dim, capacity, self.dtype)

    @torch.inference_mode()
    def forward(self, tokens: torch.Tensor, cache: KeysValues, last_only: bool = True) -> torch.Tensor:
        """Logits of ``tokens`` [T] that follow what ``cache`` holds; their K/V is added to it.

        Returns:
            ``[1, vocab]`` for the last token, or ``[T, vocab]``, in the weights' dtype.

        """
        config, weights = self.config, self._weights
        past, count = cache.length, tokens.shape[0]
        hidden = F.embedding(tokens, weights["embed"])
        rotation = self._rotation(past, count)
        mask = _causal_mask(past, count)
        for layer in range(config.layers):
            normed = _rms_norm(hidden, weights[f"{layer}.input_norm"], config.norm_eps)
            hidden = hidden + self._attention(layer, normed, rotation, mask, cache)
            normed = _rms_norm(hidden, weights[f"{layer}.post_norm"], config.norm_eps)
            hidden = hidden + self._mlp(layer, normed)
        cache.length = past + count
        if last_only:
            hidden = hidden[-1:]
        return F.linear(_rms_norm(hidden, weights["norm"], config.norm_eps), self._head)

    def _attention(
        self,
        layer: int,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        cache: KeysValues,
    ) -> torch.Tensor:
        config, count = self.config, hidden.shape[0]
        qkv = F.linear(hidden, self._weights[f"{layer}.qkv"]).view(count, -1, config.head_dim).transpose(0, 1)
        query, key, value = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads])
        keys, values = cache.append(layer, _rotate(key, rotation), value)
        attended = F.scaled_dot_product_attention(
            _rotate(query, rotation)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None and count > 1,
            enable_gqa=config.heads != config.kv_heads,
        )
        return F.linear(attended[0].transpose(0, 1).reshape(count, -1), self._weights[f"{layer}.o"])

    def _mlp(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(hidden, self._weights[f"{layer}.gate_up"]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self._weights[f"{layer}.down"])

    def _rotation(self, past: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.arange(past, past + count, dtype=torch.float32)
        angles = torch.outer(positions, self._frequencies)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


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
    """Apply the rotary embedding to ``[heads, T, head_dim]``."""
    cos, sin = rotation
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-right, left), dim=-1) * sin


def _causal_mask(past: int, count: int) -> torch.Tensor | None:
    """``[count, past + count]``, True where a token may look; None where no mask tensor is needed."""
    if past == 0 or count == 1:
        return None
    return torch.ones(count, past + count, dtype=torch.bool).tril(diagonal=past)
