"""What decides RNGD's programs: it goes to another process as text, and is of the one family that has programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import FAMILIES, TINY

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import build_layout
from rowlock.bindings.rngd.shape import ModelShape

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize("rope", [None, LLAMA3, {"rope_type": "linear", "factor": 2.0}])
def test_there_and_back(rope: dict[str, object] | None) -> None:
    config = parse_config(Path(), {**TINY, "rope_scaling": rope})
    shape = ModelShape.of(config, build_layout(config, "BF16"))
    assert ModelShape.from_json(shape.to_json()) == shape


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_another_family_is_refused_by_name(family: str) -> None:
    config = parse_config(Path(), FAMILIES[family])
    with pytest.raises(DeviceError, match=config.family) as caught:
        ModelShape.of(config, build_layout(config, "BF16"))
    assert caught.value.fault is DeviceFault.UNSUPPORTED
