"""The way into a decoder's pages for prompts that were computed elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch

from rowlock.bindings.device import DeviceError, DeviceFault, Sampling, Step
from rowlock.bindings.importing import NoRoomError, States
from rowlock.bindings.memory import RowMemory
from rowlock.bindings.model.cache.paged import PagedCache
from rowlock.bindings.model.cache.pages import PagesShortError
from rowlock.bindings.model.cache.reservation import Reservation
from rowlock.bindings.model.decoder import Programs
from rowlock.bindings.model.generation import DecoderSequence

Asked = Callable[[str], AbstractContextManager[None]]


class DecoderImporter:
    """See :class:`rowlock.bindings.importing.PromptImporter`.

    Args:
        cache: the pages; asked for each time, as what was computed under other weights must not be found.
        programs: of the resident model.
        memory: that holds its weights.
        asked: entered around everything that is asked of the device, and told what it is.

    """

    def __init__(self, cache: Callable[[], PagedCache], programs: Programs, memory: RowMemory, asked: Asked) -> None:
        self._cache = cache
        self._programs = programs
        self._memory = memory
        self._asked = asked
        self.fence = memory.fence

    def open(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> DecoderImport:
        """See :class:`rowlock.bindings.importing.PromptImporter`."""
        return DecoderImport(self._cache(), self._programs, self._memory, self._asked, prompt, sampling, capacity)


class DecoderImport:
    """See :class:`rowlock.bindings.importing.PromptImport`."""

    def __init__(
        self, cache: PagedCache, programs: Programs, memory: RowMemory, asked: Asked, prompt: tuple[int, ...],
        sampling: Sampling, capacity: int,
    ) -> None:  # fmt: skip
        lacking = cache.lacking(capacity)
        if lacking:
            raise DeviceError(DeviceFault.CAPACITY, lacking)
        self._programs = programs
        self._memory = memory
        self._asked = asked
        self._writes = memory.writes_total
        self._sampling = sampling
        tokens, settled = np.array(prompt, np.int64), programs.settled(len(prompt))
        try:
            self._room = Reservation(cache, tokens, capacity, settled)
        except PagesShortError as error:
            raise NoRoomError(str(error)) from error
        self._dtype = cache.groups[0].states.dtype

    def wanted(self, layer: int) -> range:
        return self._room.wanted(layer)

    def write(self, layer: int, first: int, states: States) -> None:
        with self._asked("importing K/V"):
            self._room.write(layer, first, states)

    def admit(self, logits: States) -> tuple[DecoderSequence, Step]:
        """See :class:`rowlock.bindings.importing.PromptImport`.

        Raises DeviceError(CORRUPT) when weights were written since it was opened: its K/V may be of others.
        """
        if self._writes != self._memory.writes_total:
            raise DeviceError(DeviceFault.CORRUPT, "weights were written since pages were reserved for this prompt")
        with self._asked("admitting a prompt"):
            sequence = DecoderSequence.admitted(self._room, self._programs, self._sampling)
            return sequence, sequence.accept(torch.from_numpy(logits.copy()).view(self._dtype))

    def release(self) -> None:
        self._room.release()

    def quarantine(self) -> None:
        self._room.quarantine()
