"""What decides the programs of a model, and nothing of its weights: free of torch, and of the vendor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

from rowlock.bindings.model.config import ModelConfig, RopeScaling
from rowlock.bindings.model.layout import Layout, ParentInfo


@dataclass(frozen=True)
class ModelShape:
    """A model's config, and its parents in the order in which programs take them; all of one dtype."""

    config: ModelConfig
    parents: tuple[ParentInfo, ...]

    @classmethod
    def of(cls, config: ModelConfig, layout: Layout) -> Self:
        return cls(config, tuple(layout.parents.values()))

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        content = json.loads(text)
        config, scaling = content["config"], content["config"]["rope_scaling"]
        return cls(
            ModelConfig(**{**config, "rope_scaling": RopeScaling(**scaling) if scaling else None}),
            tuple(ParentInfo(**parent) for parent in content["parents"]),
        )
