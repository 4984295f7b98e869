"""What is on the device."""

from __future__ import annotations

from dataclasses import dataclass

from rowlock.bindings.device import Runtime
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.plan import Model
from rowlock.daemon.owner.text import Text


@dataclass(frozen=True)
class Resident:
    """A published model. Replaced whole at each publish; never changed.

    Attributes:
        generation: under which it was published.
        model: identity, manifest, layout, checkpoint.
        runtime: its allocations and programs; outlives a B2.

    """

    generation: int
    model: Model
    config: ModelConfig
    text: Text
    runtime: Runtime
