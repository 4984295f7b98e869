"""One sequence being generated."""

from __future__ import annotations

from typing import Final

import torch

from rowlock.bindings.device import DeviceError, DeviceFault, Sampling
from rowlock.bindings.model.decoder import Decoder
from rowlock.bindings.model.keys_values import KeysValues

PREFILL_CHUNK: Final = 512
"""Prompt tokens of one step: what a step may delay others by."""


class DecoderSequence:
    """See :class:`rowlock.bindings.device.Sequence`."""

    def __init__(self, decoder: Decoder, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> None:
        self._decoder = decoder
        self._pending = torch.tensor(prompt, dtype=torch.long)
        self._sampler = Sampler(sampling)
        self._cache: KeysValues | None = decoder.new_cache(capacity)

    def advance(self) -> int | None:
        assert self._cache is not None, "the sequence is closed"
        chunk, self._pending = self._pending[:PREFILL_CHUNK], self._pending[PREFILL_CHUNK:]
        logits = self._decoder.forward(chunk, self._cache)
        if len(self._pending):
            return None
        token = self._sampler.choose(logits[0])
        self._pending = torch.tensor([token])
        return token

    def close(self) -> None:
        self._cache = None


class Sampler:
    """Chooses tokens from logits; its own random stream, so that neighbours cannot disturb it."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = torch.Generator().manual_seed(sampling.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """A token id from logits ``[vocab]``.

        Raises:
            DeviceError: CORRUPT, when a logit is not a number or infinite: no token would mean anything.

        """
        sampling = self._sampling
        if not bool(torch.isfinite(logits).all()):
            raise DeviceError(DeviceFault.CORRUPT, "the model computed logits that are not finite")
        if sampling.temperature == 0:
            return int(logits.argmax())
        wide = logits.double()
        scaled = (wide - wide.max()) / sampling.temperature
        if 0 < sampling.top_k < len(scaled):
            floor = scaled.topk(sampling.top_k).values[-1]
            scaled = scaled.masked_fill(scaled < floor, -torch.inf)
        probabilities, tokens = scaled.softmax(-1).sort(descending=True, stable=True)
        if 0 < sampling.top_p < 1:
            # a token stays while those before it have not yet reached top_p
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= sampling.top_p, 0)
        return int(tokens[torch.multinomial(probabilities, 1, generator=self._random)])
