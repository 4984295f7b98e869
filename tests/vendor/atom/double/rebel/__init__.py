"""A double of rebel-compiler, ours: only the two calls that rowlock.bindings.atom.rebel_sdk makes.

It follows the signatures with which optimum-rbln 0.12.0 calls the package, and shows nothing about it. A "compiled
graph" is a file of any bytes; "running" it stores tokens at their positions in this process's memory, which all graphs
of a device share as the real ones share their K/V, and answers with one logit that stands out: see `chosen_token`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import ClassVar

import torch

VOCAB = 260


def chosen_token(weights: bytes, tokens: list[int]) -> int:
    """Greedy token after a history: any change of bytes, order or position changes it."""
    digest = hashlib.sha256(weights + json.dumps(tokens).encode()).digest()
    return int.from_bytes(digest[:4], "little") % 256


def answer(weights: bytes, prompt: tuple[int, ...], count: int) -> list[int]:
    """What a request that is alone with its graphs is told."""
    history = list(prompt)
    for _ in range(count):
        history.append(chosen_token(weights, history))
    return history[len(prompt) :]


class RBLNCompiledModel:
    """A parsed file."""

    live: ClassVar[int] = 0

    def __init__(self, path: str) -> None:
        self.content = Path(path).read_bytes()
        if self.content.startswith(b"broken"):
            raise RuntimeError(f"{path} is no compiled model")
        # a pair of graphs shares its weights: what follows the first line
        self.weights = self.content.partition(b"\n")[2]
        RBLNCompiledModel.live += 1

    def __del__(self) -> None:
        RBLNCompiledModel.live -= hasattr(self, "weights")


class Runtime:
    """A graph on a device."""

    live: ClassVar[int] = 0
    most: ClassVar[int] = 0
    histories: ClassVar[dict[int, dict[int, int]]] = {}

    def __init__(
        self,
        model: RBLNCompiledModel,
        tensor_type: str = "np",
        device: int = 0,
        activate_profiler: bool = False,
        timeout: int = 60,
    ) -> None:
        assert isinstance(model, RBLNCompiledModel)
        assert tensor_type == "pt"
        if model.weights.startswith(b"too large"):
            raise RuntimeError("device memory is short")
        self._model = model
        self._tokens = Runtime.histories.setdefault(device, {})
        Runtime.live += 1
        Runtime.most = max(Runtime.most, Runtime.live)

    def __del__(self) -> None:
        Runtime.live -= hasattr(self, "_tokens")

    def __call__(self, *inputs: torch.Tensor, out: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        tokens, positions, blocks = inputs[:3]
        assert (tokens.dtype, positions.dtype, blocks.dtype) == (torch.int64, torch.int32, torch.int16)
        assert tokens.shape == positions.shape
        last = int(inputs[3]) if len(inputs) == 4 else 0
        assert blocks.dim() == (1 if len(inputs) == 4 else 2)
        for token, position in list(zip(tokens[0].tolist(), positions[0].tolist(), strict=True))[: last + 1]:
            self._tokens[position] = token
        history = [self._tokens[position] for position in range(int(positions[0, last]) + 1)]
        logits = torch.zeros(1, 1, VOCAB)
        logits[0, 0, chosen_token(self._model.weights, history)] = 1
        if out is None:
            return [logits]
        out[0].copy_(logits)
        return out
