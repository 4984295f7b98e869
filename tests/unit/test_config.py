"""The decoder understands a config in full, or says what it does not understand."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import TINY, copy, random_tensors, write_weights

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.bindings.model.config import RopeScaling, parse_config
from rowlock.bindings.model.layout import build_layout, layout_of

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}


def parse(**changes: object):  # type: ignore[no-untyped-def]
    return parse_config(Path("/m"), {**TINY, **changes})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "mistral"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("sliding_window", 128),
        ("quantization_config", {"bits": 4}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("rope_scaling", "linear"),
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("hidden_size", True),
        ("num_hidden_layers", 2.5),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("rms_norm_eps", -1),
        ("vocab_size", 2**40),
        ("tie_word_embeddings", "false"),
        ("rope_theta", 1e400),
        ("rms_norm_eps", 10**40),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
        (
            "rope_scaling",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        ("some_new_option", 7),
    ],
)
def test_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(**{key: value})
    assert caught.value.fault is CheckpointFault.UNSUPPORTED
    names = {"yarn": "rope_type", "default": "partial_rotary_factor", "llama3": "low_freq_factor"}
    named = names[value["rope_type"]] if isinstance(value, dict) and "rope_type" in value else key
    assert named in str(caught.value)


def test_old_and_new_rope_keys_are_one() -> None:
    old = parse(rope_theta=500000.0, rope_scaling=LLAMA3)
    new = parse(rope_theta=None, rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    assert old == new
    assert old.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 512)


def test_head_dim_is_inferred_only_where_absent() -> None:
    assert parse(head_dim=32).head_dim == 32
    assert parse(head_dim=None).head_dim == 16
    with pytest.raises(CheckpointError, match="head_dim"):
        parse(head_dim=None, hidden_size=66)


def test_rope_may_be_said_once() -> None:
    with pytest.raises(CheckpointError, match="only one of"):
        parse(rope_scaling=LLAMA3, rope_parameters={"rope_type": "default"})


def test_more_layers_than_tensors_are_refused_before_they_are_laid_out(tiny: Path, tmp_path: Path) -> None:
    directory = copy(tiny, tmp_path / "many")
    config = parse(num_hidden_layers=2_000_000_000)
    with Checkpoint.open(directory) as checkpoint, pytest.raises(CheckpointError, match="num_hidden_layers"):
        layout_of(checkpoint, config)


def test_placements_tile_their_parents() -> None:
    for tied in (True, False):
        layout = build_layout(parse(tie_word_embeddings=tied), "BF16")
        assert ("head" in layout.parents) != tied
        for name, parent in layout.parents.items():
            row = 0
            for item in layout.in_parent(name):
                assert item.first_row == row
                assert item.tensor.row_bytes == parent.row_bytes
                row += item.tensor.rows
            assert row == parent.rows


@pytest.mark.parametrize(
    ("change", "fault", "says"),
    [
        (lambda t: {k: v for k, v in t.items() if k.name != "model.norm.weight"}, "MISSING", "model.norm.weight"),
        (lambda t: {**t, TensorInfo("extra", "BF16", (2,)): b"1234"}, "UNEXPECTED", "extra"),
        (lambda t: {(TensorInfo(k.name, "F32", k.shape) if "norm" in k.name else k): (v * 2 if "norm" in k.name else v)
                    for k, v in t.items()}, "DTYPE", "BF16, F32"),
        (lambda t: {(TensorInfo(k.name, k.dtype, (130, 128)) if "embed" in k.name else k): v
                    for k, v in t.items()}, "SHAPE", "embed_tokens"),
    ],
)  # fmt: skip
def test_tensors_must_fill_the_layout_exactly(tiny: Path, tmp_path: Path, change, fault: str, says: str) -> None:  # type: ignore[no-untyped-def]
    directory = copy(tiny, tmp_path / "changed")
    write_weights(directory, change(random_tensors(TINY, 0)))
    with (
        Checkpoint.open(directory) as checkpoint,
        pytest.raises(CheckpointError, match=says) as caught,
    ):
        layout_of(checkpoint, parse())
    assert caught.value.fault == fault
