"""Keys and values of one sequence."""

from __future__ import annotations

import torch

from rowlock.bindings.device import DeviceError, DeviceFault


class KeysValues:
    """K/V of all layers, layer by layer: ``[layers, 2, kv_heads, capacity, head_dim]``.

    Attributes:
        states: the tensor of that shape.
        capacity: tokens that there is room for.
        length: tokens that every layer holds. A layer may be ahead while a step runs.

    """

    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        try:
            self.states = torch.empty(layers, 2, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        except RuntimeError as error:
            raise DeviceError(DeviceFault.OUT_OF_MEMORY, f"K/V of {capacity} tokens: {error}") from error
        self.capacity = capacity
        self.length = 0

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``[kv_heads, T, head_dim]`` behind ``length``; returns all K and V up to there."""
        stop = self.length + key.shape[1]
        assert stop <= self.capacity, "the sequence is full"
        keys, values = self.states[layer, 0], self.states[layer, 1]
        keys[:, self.length : stop] = key
        values[:, self.length : stop] = value
        return keys[:, :stop], values[:, :stop]
