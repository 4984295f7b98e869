"""What decides RNGD's programs: it goes to another process as text, and is of the one family that has programs."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import FAMILIES, TINY

from rowlock.bindings.device import DeviceError, DeviceFault, Variant
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import build_layout
from rowlock.bindings.rngd.shape import ModelShape, ProgramSet, program_shapes

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
    wanted = ProgramSet.of(config, build_layout(config, "BF16"), (Variant(1, 7),))
    assert ProgramSet.from_json(wanted.to_json()) == wanted


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_another_family_is_refused_by_name(family: str) -> None:
    config = parse_config(Path(), FAMILIES[family])
    with pytest.raises(DeviceError, match=config.family) as caught:
        ModelShape.of(config, build_layout(config, "BF16"))
    assert caught.value.fault is DeviceFault.UNSUPPORTED


@pytest.mark.parametrize(
    ("context", "lengths", "names"),
    [
        (2048, (), ["1x512", "64x512", "1x2048", "64x2048"]),
        (256, (), ["1x256", "64x256"]),
        (1, (), ["1x1"]),
        (2048, (100, 16), ["1x512", "16x512", "100x512", "1x2048", "16x2048", "100x2048"]),
        (2048, (600,), ["1x512", "512x512", "1x2048", "600x2048"]),
        (256, (1,), ["1x256"]),
    ],
)
def test_variants_decide_the_programs_and_any_request_finds_some(
    context: int, lengths: tuple[int, ...], names: list[str]
) -> None:
    config = parse_config(Path(), {**TINY, "max_position_embeddings": context})
    shapes = program_shapes(config, tuple(Variant(1, length) for length in lengths))
    assert [shape.name for shape in shapes] == [f"decoder-{name}" for name in names]
    assert max(shape.capacity for shape in shapes) == context
    assert {shape.capacity for shape in shapes if shape.length == 1} == {shape.capacity for shape in shapes}


def test_no_program_is_for_several_requests() -> None:
    with pytest.raises(AssertionError, match="for one request"):
        program_shapes(parse_config(Path(), TINY), (Variant(2, 16),))
