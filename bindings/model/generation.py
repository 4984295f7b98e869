"""Sequences being generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from rowlock.bindings.device import DeviceError, DeviceFault, Sampling, Step
from rowlock.bindings.model.decoder import Decoder, Span
from rowlock.bindings.model.keys_values import KeysValues

PREFILL_CHUNK: Final = 128
"""Prompt tokens of one step: what a step may delay others by."""


class DecoderSequence:
    """See :class:`rowlock.bindings.device.Sequence`.

    Attributes:
        cache: its K/V; None once it is closed.
        pending: tokens ``[T]`` that are not in the cache yet.
        sampler: chooses its tokens.

    """

    def __init__(self, decoder: Decoder, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> None:
        self.pending = torch.tensor(prompt, dtype=torch.long)
        self.sampler = Sampler(sampling)
        self.cache: KeysValues | None = decoder.new_cache(capacity)

    def close(self) -> None:
        self.cache = None


Forward = Callable[[Sequence[Span]], torch.Tensor]
"""Logits ``[len(spans), vocab]`` of the last token of each; see ``Decoder.forward``."""


def advance(forward: Forward, sequences: Sequence[DecoderSequence]) -> list[Step]:
    """One step of every sequence, as one batch; see :meth:`rowlock.bindings.device.Runtime.advance`."""
    spans = []
    for sequence in sequences:
        assert sequence.cache is not None, "the sequence is closed"
        spans.append(Span(sequence.pending[:PREFILL_CHUNK], sequence.cache))
        sequence.pending = sequence.pending[PREFILL_CHUNK:]
    logits = forward(spans)
    return [_next(sequence, row) for sequence, row in zip(sequences, logits, strict=True)]


def _next(sequence: DecoderSequence, logits: torch.Tensor) -> Step:
    if len(sequence.pending):
        return None
    try:
        token = sequence.sampler.choose(logits)
    except DeviceError as error:
        return error
    sequence.pending = torch.tensor([token])
    return token


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
