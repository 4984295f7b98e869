"""The decoder understands a config in full, or says what it does not understand."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import FAMILIES, GEMMA3, QWEN3, TINY, copy, random_tensors, write_weights

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import build_layout, layout_of
from rowlock.bindings.model.rope import Rope, RopeScaling

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
    assert old.rope == Rope(500000.0, scaling=RopeScaling(8.0, 1.0, 4.0, 512))


def test_head_dim_is_inferred_only_where_absent() -> None:
    assert parse(head_dim=32).head_dim == 32
    assert parse(head_dim=None).head_dim == 16
    with pytest.raises(CheckpointError, match="head_dim"):
        parse(head_dim=None, hidden_size=66)


def of(base: dict[str, object], **changes: object):  # type: ignore[no-untyped-def]
    return parse_config(Path("/m"), {**base, **changes})


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (TINY, "architectures", ["LlamaForSequenceClassification"]),
        (QWEN3, "architectures", ["LlamaForCausalLM"]),
        (QWEN3, "attention_bias", True),
        (QWEN3, "hidden_act", "gelu_pytorch_tanh"),
        (QWEN3, "layer_types", ["full_attention"]),
        (QWEN3, "layer_types", ["full_attention", "chunked_attention"]),
        (QWEN3, "rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        (QWEN3, "query_pre_attn_scalar", 256),
        (GEMMA3, "hidden_activation", "gelu"),
        (GEMMA3, "attn_logit_softcapping", 50.0),
        (GEMMA3, "final_logit_softcapping", 30.0),
        (GEMMA3, "use_bidirectional_attention", True),
        (GEMMA3, "attention_bias", True),
        (GEMMA3, "sliding_window", None),
        (GEMMA3, "sliding_window", 0),
        (GEMMA3, "query_pre_attn_scalar", 0),
        (GEMMA3, "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        (GEMMA3, "rope_parameters", {"full_attention": {"rope_type": "yarn"}}),
        (GEMMA3, "rope_scaling", {"rope_type": "linear", "factor": 8.0}),
        (GEMMA3, "altup_num_inputs", 4),
        (GEMMA3, "model_type", "gemma3"),
        (GEMMA3, "model_type", "qwen3_moe"),
    ],
)
def test_refused_by_name_in_every_family(base: dict[str, object], key: str, value: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        of(base, **{key: value})
    assert caught.value.fault is CheckpointFault.UNSUPPORTED
    assert key in str(caught.value)


OLD_GEMMA = {key: value for key, value in GEMMA3.items() if key not in ("layer_types", "rope_parameters")}


def test_old_and_new_keys_of_gemma_are_one() -> None:
    old = of(OLD_GEMMA, sliding_window_pattern=2, rope_theta=1000000.0, rope_local_base_freq=10000)
    assert old == of(GEMMA3)
    assert old.windows == (16, None, 16)
    assert [old.ropes[old.rope_index(layer)].theta for layer in range(3)] == [1e4, 1e6, 1e4]
    scaled = of(OLD_GEMMA, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert scaled.ropes == (Rope(1e6, factor=8.0), Rope(1e4))


def test_windows() -> None:
    assert of(OLD_GEMMA, num_hidden_layers=7).windows == (16,) * 5 + (None, 16)
    assert of(TINY).windows == (None, None)
    sliding = {"use_sliding_window": True, "sliding_window": 8}
    assert of(QWEN3, **sliding, max_window_layers=1).windows == (None, 8)
    assert of(QWEN3, sliding_window=8, max_window_layers=1).windows == (None, None)
    assert of(QWEN3, **sliding, layer_types=["sliding_attention", "full_attention"]).windows == (8, None)
    assert of(QWEN3, **sliding).windows == (None, None)
    with pytest.raises(CheckpointError, match="use_sliding_window"):
        of(QWEN3, sliding_window=8, layer_types=["sliding_attention", "full_attention"])


def test_the_scale_of_queries() -> None:
    assert of(GEMMA3).query_scale == 24**-0.5
    assert of(QWEN3).query_scale == 24**-0.5
    assert of(TINY).query_scale == 0.25


def test_rope_may_be_said_once() -> None:
    with pytest.raises(CheckpointError, match="only one of"):
        parse(rope_scaling=LLAMA3, rope_parameters={"rope_type": "default"})


def test_more_layers_than_tensors_are_refused_before_they_are_laid_out(tiny: Path, tmp_path: Path) -> None:
    directory = copy(tiny, tmp_path / "many")
    with pytest.raises(CheckpointError, match="num_hidden_layers"):
        parse(num_hidden_layers=2_000_000_000)
    config = parse(num_hidden_layers=4000)
    with Checkpoint.open(directory) as checkpoint, pytest.raises(CheckpointError, match="num_hidden_layers"):
        layout_of(checkpoint, config)


@pytest.mark.parametrize("family", FAMILIES)
def test_placements_tile_their_parents(family: str) -> None:
    for tied in (True, False):
        config = parse_config(Path("/m"), {**FAMILIES[family], "tie_word_embeddings": tied})
        layout = build_layout(config, "BF16")
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
