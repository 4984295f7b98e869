"""What decides the programs of a model, and nothing of its weights: free of torch, and of the vendor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from rowlock.bindings.device import DeviceError, DeviceFault, Variant
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout, ParentInfo
from rowlock.bindings.model.rope import Rope, RopeScaling

FAMILY: Final = "llama"
"""The only one that there are programs of."""
PREFILL_LENGTH: Final = 64
"""Tokens of a prompt that go through a program at once, where no variant says how many."""
CAPACITY_SMALL: Final = 512
BATCH_MAX: Final = 1
"""Requests of one program: one for several rounds otherwise, and an answer would depend on who else runs."""


@dataclass(frozen=True, order=True)
class ProgramShape:
    """The shapes of one program: ``length`` tokens at once, K/V of ``capacity`` tokens before them."""

    length: int
    capacity: int

    @property
    def name(self) -> str:
        return f"decoder-{self.length}x{self.capacity}"


def program_shapes(config: ModelConfig, variants: tuple[Variant, ...]) -> tuple[ProgramShape, ...]:
    """What a runtime prepares: one token, and the prompts of these variants, for short sequences and for the longest.

    With these any request of the context can be computed: a longer prompt goes through in pieces, a shorter one padded.

    Args:
        config: of the model.
        variants: of one request each, within the context. None: prompts go through in pieces of ``PREFILL_LENGTH``.

    """
    assert all(variant.batch <= BATCH_MAX for variant in variants), "programs are for one request"
    lengths = {1, *(variant.length for variant in variants)} if variants else {1, PREFILL_LENGTH}
    capacities = sorted({min(CAPACITY_SMALL, config.context), config.context})
    return tuple(
        ProgramShape(length, capacity)
        for capacity in capacities
        for length in sorted({min(item, capacity) for item in lengths})
    )


@dataclass(frozen=True)
class ModelShape:
    """A model's config, and its parents in the order in which programs take them; all of one dtype."""

    config: ModelConfig
    parents: tuple[ParentInfo, ...]

    @classmethod
    def of(cls, config: ModelConfig, layout: Layout) -> Self:
        """Raises DeviceError, UNSUPPORTED, when the model is of another family."""
        if config.family != FAMILY:
            raise DeviceError(
                DeviceFault.UNSUPPORTED, f"model_type is {config.family!r}: there are RNGD programs of {FAMILY!r} only"
            )
        return cls(config, tuple(layout.parents.values()))

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Self:
        config, rope = content["config"], content["config"]["rope"]
        scaling = RopeScaling(**rope["scaling"]) if rope["scaling"] else None
        return cls(
            ModelConfig(
                **{**config, "windows": tuple(config["windows"]), "rope": Rope(**{**rope, "scaling": scaling})}
            ),
            tuple(ParentInfo(**parent) for parent in content["parents"]),
        )


@dataclass(frozen=True)
class ProgramSet:
    """Programs of one model: what the process that builds them is asked for."""

    model: ModelShape
    shapes: tuple[ProgramShape, ...]

    @classmethod
    def of(cls, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...]) -> Self:
        """Raises DeviceError, UNSUPPORTED, when the model is of another family."""
        return cls(ModelShape.of(config, layout), program_shapes(config, variants))

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        content = json.loads(text)
        shapes = tuple(ProgramShape(**shape) for shape in content["shapes"])
        return cls(ModelShape.from_content(content["model"]), shapes)
