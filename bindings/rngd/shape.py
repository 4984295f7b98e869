"""What decides the programs of a model, and nothing of its weights: free of torch, and of the vendor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final, Self

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout, ParentInfo
from rowlock.bindings.model.rope import Rope, RopeScaling

FAMILY: Final = "llama"
"""The only one that there are programs of."""


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

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        content = json.loads(text)
        config, rope = content["config"], content["config"]["rope"]
        scaling = RopeScaling(**rope["scaling"]) if rope["scaling"] else None
        return cls(
            ModelConfig(
                **{**config, "windows": tuple(config["windows"]), "rope": Rope(**{**rope, "scaling": scaling})}
            ),
            tuple(ParentInfo(**parent) for parent in content["parents"]),
        )
