"""Sequences being generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray

from rowlock.bindings.device import DeviceError, DeviceFault, Preempted, Sampling, Step
from rowlock.bindings.model.cache.geometry import SPAN_TOKENS
from rowlock.bindings.model.cache.paged import PagedCache
from rowlock.bindings.model.cache.pages import PagesShortError
from rowlock.bindings.model.cache.reservation import Reservation
from rowlock.bindings.model.cache.table import BlockTable
from rowlock.bindings.model.decoder import Programs, Span

PROMPT_CHUNK: Final = SPAN_TOKENS
"""Prompt tokens of one step while nobody decodes."""


class DecoderSequence:
    """See :class:`rowlock.bindings.device.Sequence`.

    It keeps all of its tokens, so that it can compute their K/V again after it was preempted: the prompt as a prompt,
    what followed as it was computed before.

    Args:
        table: its pages, whose capacity is how far it may grow.
        programs: that will compute it.
        prompt: its first tokens.

    Attributes:
        table: None once it is closed.

    """

    def __init__(self, table: BlockTable, programs: Programs, prompt: NDArray[np.int64], sampling: Sampling) -> None:
        self.table: BlockTable | None = table
        self._tokens = torch.zeros(table.capacity, dtype=torch.long)
        self._tokens[: len(prompt)] = torch.from_numpy(prompt)
        self._known = self._prompt = len(prompt)
        self._settled = programs.settled(len(prompt))
        self._replayed = programs.replayed
        self._sampler = Sampler(sampling)

    @classmethod
    def opened(
        cls, cache: PagedCache, programs: Programs, prompt: tuple[int, ...], sampling: Sampling, capacity: int
    ) -> Self:
        """One that has computed nothing yet, and may grow to ``capacity`` tokens."""
        return cls(BlockTable(cache, capacity), programs, np.array(prompt, np.int64), sampling)

    @classmethod
    def admitted(cls, reservation: Reservation, programs: Programs, sampling: Sampling) -> Self:
        """One whose prompt was computed elsewhere."""
        table = reservation.admit()
        try:
            return cls(table, programs, reservation.prompt, sampling)
        except BaseException:
            table.close()
            raise

    @property
    def waiting(self) -> int:
        """Tokens whose K/V is not computed yet: 1 for one that decodes."""
        return self._known - self.pages.length

    @property
    def pages(self) -> BlockTable:
        assert self.table is not None, "the sequence is closed"
        return self.table

    def begin(self) -> None:
        """Take over what is known of the prompt, if it holds nothing yet."""
        if not self.pages.length:
            self.pages.begin(self._tokens[: self._prompt].numpy(), self._settled)

    def next_span(self, most: int) -> Span:
        """The next tokens, at most so many: of the prompt only, or of what followed only."""
        start = self.pages.length
        in_prompt = start < self._prompt
        count = min(most, (self._prompt if in_prompt else self._known) - start)
        if not in_prompt:
            count = min(count, self._replayed)
        return Span(self._tokens[start : start + count], self.pages, self._prompt if in_prompt else 1)

    def preempt(self) -> None:
        """Give the pages up."""
        self.pages.release()

    def accept(self, logits: torch.Tensor) -> Step:
        """What follows from the logits ``[vocab]`` of the last span taken."""
        if self.waiting:
            return None
        try:
            token = self._sampler.choose(logits)
        except DeviceError as error:
            self.pages.cache.forget_prefixes()  # what it looked at may be no better, and would fail others
            return error
        if self._known < len(self._tokens):
            self._tokens[self._known] = token
        self._known += 1
        return token

    def close(self) -> None:
        table, self.table = self.table, None
        if table is not None:
            table.close()


class Stepper:
    """Steps over several sequences: a token each of those that decode, and a piece of the oldest prompts.

    Pieces are small while others decode, so that nobody waits long for a token. Who is older is served first, and
    when pages run short the youngest give theirs up: the oldest always comes to its end.

    Args:
        programs: compute.

    """

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def advance(self, sequences: Sequence[DecoderSequence], shared_chunk: int) -> list[Step]:
        """See :meth:`rowlock.bindings.device.Runtime.advance`.

        Args:
            sequences: all that run, the oldest first.
            shared_chunk: prompt tokens of one step while others decode.

        """
        decoding = any(sequence.waiting == 1 for sequence in sequences)
        left = shared_chunk if decoding else PROMPT_CHUNK
        spans: dict[int, Span] = {}
        running = list(sequences)
        for sequence in sequences:
            alone = sequence.waiting == 1
            if sequence not in running or not (alone or left):
                continue
            sequence.begin()
            span = sequence.next_span(1 if alone else left)
            if not _reserve(running, sequence, len(span.tokens)):
                continue
            left -= 0 if alone else len(span.tokens)
            spans[id(sequence)] = span
        chosen = [sequence for sequence in sequences if id(sequence) in spans]
        steps: dict[int, Step] = {id(item): Preempted.PREEMPTED for item in sequences if item not in running}
        if chosen:
            logits = self._programs.forward([spans[id(sequence)] for sequence in chosen]).cpu()  # chosen on the host
            steps |= {id(sequence): sequence.accept(row) for sequence, row in zip(chosen, logits, strict=True)}
        return [steps.get(id(sequence)) for sequence in sequences]


def _reserve(running: list[DecoderSequence], sequence: DecoderSequence, count: int) -> bool:
    """Have pages for the next tokens of one of those that run; the youngest give theirs up for it, itself at last."""
    while True:
        try:
            sequence.pages.reserve(count)
        except PagesShortError:
            youngest = running.pop()
            youngest.preempt()
            if youngest is sequence:
                return False
        else:
            return True


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
