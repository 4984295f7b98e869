"""Sequences being generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from rowlock.bindings.device import DeviceError, DeviceFault, Sampling, Step
from rowlock.bindings.model.decoder import Decoder, Span
from rowlock.bindings.model.keys_values import KeysValues

Forward = Callable[[Sequence[Span]], torch.Tensor]
"""Logits ``[len(spans), vocab]`` of the last token of each; see ``Decoder.forward``."""

PROMPT_CHUNK: Final = 128
"""Prompt tokens of one step while nobody decodes."""


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
        self._prompt = len(prompt)

    @property
    def in_prompt(self) -> bool:
        return len(self.pending) > 1

    def take(self, count: int) -> Span:
        """The next tokens, at most so many."""
        assert self.cache is not None, "the sequence is closed"
        chunk, self.pending = self.pending[:count], self.pending[count:]
        return Span(chunk, self.cache, self._prompt if self.cache.length < self._prompt else 1)

    def accept(self, logits: torch.Tensor) -> Step:
        """What follows from the logits ``[vocab]`` of the last span taken."""
        if len(self.pending):
            return None
        try:
            token = self.sampler.choose(logits)
        except DeviceError as error:
            return error
        self.pending = torch.tensor([token])
        return token

    def close(self) -> None:
        self.cache = None


class Stepper:
    """Steps over several sequences: prompts and single tokens take turns.

    One prompt at a time, the oldest first, and in small pieces while others decode: nobody waits for more than one
    piece between two tokens, and the first answers do not wait for the last prompts.

    Args:
        forward: computes.

    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._prompt_was_last = False

    def choose(self, sequences: Sequence[DecoderSequence]) -> list[DecoderSequence]:
        """Those that the next step is for: one in its prompt, or all that are past theirs."""
        prompts = [sequence for sequence in sequences if sequence.in_prompt]
        decoding = [sequence for sequence in sequences if not sequence.in_prompt]
        self._prompt_was_last = bool(prompts) and not (decoding and self._prompt_was_last)
        return prompts[:1] if self._prompt_was_last else decoding

    def advance(self, sequences: Sequence[DecoderSequence], shared_chunk: int) -> list[Step]:
        """See :meth:`rowlock.bindings.device.Runtime.advance`.

        Args:
            sequences: all that run.
            shared_chunk: prompt tokens of one step while others decode.

        """
        chosen = self.choose(sequences)
        alone = all(sequence.in_prompt for sequence in sequences)
        spans = [sequence.take(PROMPT_CHUNK if alone else shared_chunk) for sequence in chosen]
        logits = self._forward(spans).cpu()  # tokens are chosen on the host
        steps = {id(sequence): sequence.accept(row) for sequence, row in zip(chosen, logits, strict=True)}
        return [steps.get(id(sequence)) for sequence in sequences]


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
        single = logits.float().numpy()  # numpy looks through it ten times as fast as torch through bfloat16
        if not np.isfinite(single).all():
            raise DeviceError(DeviceFault.CORRUPT, "the model computed logits that are not finite")
        if sampling.temperature == 0:
            return int(single.argmax())
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
