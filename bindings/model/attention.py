"""Attention, and the rotary embedding in front of it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from rowlock.bindings.model.rope import Rope


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Causal attention of the last T positions of one sequence.

    Args:
        query: ``[T, heads, head_dim]``.
        keys: ``[kv_heads, positions, head_dim]``.
        values: like ``keys``.
        scale: of the products of queries and keys.
        window: how many positions each looks at, its own included; None: all.

    Returns:
        ``[T, heads, head_dim]``.

    """
    count, positions = len(query), keys.shape[1]
    full = window is not None and positions >= window
    if full and count == 1:
        return _attend_window(query, keys[:, -window:], values[:, -window:], scale)  # type: ignore[operator]
    mask = _mask(positions - count, count, window if full else None, query.device)
    attended: torch.Tensor = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None and count > 1,
        scale=scale,
        enable_gqa=query.shape[1] != keys.shape[0],
    )
    return attended[0].transpose(0, 1)


def _attend_window(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Of one token to all keys of a full window: the heads of a group are asked for together, as transformers does."""
    grouped = query.view(1, keys.shape[0], -1, query.shape[2])
    return F.scaled_dot_product_attention(grouped, keys[None], values[None], scale=scale).view(query.shape)


def _mask(past: int, count: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """``[count, past + count]``, True where a token may look; None where no mask tensor is needed."""
    if window is None and (past == 0 or count == 1):
        return None
    mask = torch.ones(count, past + count, dtype=torch.bool, device=device).tril(diagonal=past)
    return mask if window is None else mask.triu(diagonal=past + 1 - window)


def rope_frequencies(head_dim: int, rope: Rope) -> torch.Tensor:
    """Rotary frequencies ``[head_dim / 2]``, float32.

    Source: RoFormer (arXiv 2104.09864); the ``llama3`` scaling is that of Llama 3.1's
    reference code: long wavelengths are divided by ``factor``, short ones kept, those
    between interpolated.
    """
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    frequencies /= rope.factor
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (scaling.original_context / wavelengths - low) / (high - low)
    between = (1 - smooth) * frequencies / scaling.factor + smooth * frequencies
    scaled = torch.where(wavelengths > scaling.original_context / low, frequencies / scaling.factor, frequencies)
    medium = (wavelengths <= scaling.original_context / low) & (wavelengths >= scaling.original_context / high)
    return torch.where(medium, between, scaled)


def rotate(states: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Apply the rotary embedding, cosines and sines ``[T, 1, head_dim]``, to ``[T, heads, head_dim]``."""
    cos, sin = rotation
    left, right = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-right, left), dim=-1) * sin
