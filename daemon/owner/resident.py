"""What is on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rowlock.bindings.checkpoint.stamps import FileStamp
from rowlock.bindings.device import Runtime
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.plan import Model
from rowlock.daemon.owner.target import Target
from rowlock.daemon.owner.text import Text


@dataclass(frozen=True)
class Resident:
    """A published model. Replaced whole at each publish; never changed.

    Attributes:
        generation: under which it was published.
        model: identity, manifest, layout, checkpoint.
        text: tokenizer and stop tokens.
        runtime: its allocations and programs; outlives a B2.
        stamps: of the checkpoint's weight files when they were digested.
        overlay: file of pushed rows over the checkpoint, or empty.

    """

    generation: int
    model: Model
    config: ModelConfig
    text: Text
    runtime: Runtime
    stamps: Mapping[str, FileStamp]
    overlay: str

    @classmethod
    def of(cls, generation: int, target: Target, runtime: Runtime) -> Self:
        return cls(generation, target.model, target.config, target.text, runtime, target.stamps, target.overlay)
