"""Prompts whose K/V was computed elsewhere: what a runtime offers to take them in. Free of torch.

::

    open ──> write, write, ... ──> admit ──> a sequence like any other
                              ├──> release
                              └──> quarantine
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from rowlock.bindings.device import Sampling, Sequence, Step

States = npt.NDArray[np.generic]
"""Values of the model's dtype; their type only has the right size, as numpy knows no bfloat16. Never written to."""


class NoRoomError(Exception):
    """There is no room now; there will be when others have ended."""


class PromptImport(Protocol):
    """Room for the K/V of one prompt. Nothing else sees it, or can find it, before it is admitted."""

    def wanted(self, layer: int) -> range:
        """The positions of a layer whose K/V is wanted: what is known already, or out of sight, is not."""
        ...

    def write(self, layer: int, first: int, states: States) -> None:
        """Start copying K/V ``[layers, 2, kv_heads, T, head_dim]`` to positions ``first`` on.

        The layers are those from ``layer`` on, all of one cache group. Raises ValueError, before any effect, when they
        are not all wanted or of another shape. After a DeviceError it is not known what was copied. ``states`` must
        not change before the next fence.
        """
        ...

    def admit(self, logits: States) -> tuple[Sequence, Step]:
        """Everything wanted was written and fenced: the sequence, and what its last logits ``[vocab]`` give."""
        ...

    def release(self) -> None:
        """Let the room go; after a fence. Idempotent."""
        ...

    def quarantine(self) -> None:
        """Give the room up for good: a copy may still be writing to it."""
        ...


class PromptImporter(Protocol):
    """The way into a runtime for prompts that were computed elsewhere."""

    def open(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> PromptImport:
        """Take room for a prompt that will grow to ``capacity`` tokens.

        Raises NoRoomError, or DeviceError(CAPACITY), with the numbers, when it could never fit.
        """
        ...

    def fence(self) -> None:
        """Return when every copy has finished, or raise DeviceError."""
        ...
