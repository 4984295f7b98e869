"""Conversion from GGUF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.gguf import convert_gguf, to_bf16
from rowlock.bindings.checkpoint.gguf_models import architecture_of, unpermute
from rowlock.bindings.checkpoint.gguf_tokenizers import write_tokenizer


def test_bf16_rounding_is_torchs_for_every_kind_of_value() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 1_000_000, np.uint32)
    special = np.array([0, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x3F808000, 0x3F818000], np.uint32)
    values = np.concatenate([bits, special]).view(np.float32)
    ours = to_bf16(values).view(np.int16)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    finite = ~np.isnan(values)
    assert np.array_equal(ours[finite], theirs[finite])
    assert torch.from_numpy(ours[~finite]).view(torch.bfloat16).isnan().all()


def test_unpermute_undoes_llama_cpps_permutation() -> None:
    heads, head_dim, columns = 3, 8, 5
    original = np.arange(heads * head_dim * columns, dtype=np.float32).reshape(-1, columns)
    permuted = original.reshape(heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(-1, columns)
    assert not np.array_equal(permuted, original)
    assert np.array_equal(unpermute(permuted, heads), original)


def test_what_is_no_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a gguf file at all")
    with pytest.raises(CheckpointError, match=r"x\.gguf") as caught:
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out", lambda *_: None)
    assert caught.value.fault is CheckpointFault.MALFORMED
    with pytest.raises(CheckpointError) as caught:
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "out", lambda *_: None)
    assert caught.value.fault is CheckpointFault.NOT_FOUND
    assert [item.name for item in tmp_path.iterdir()] == ["x.gguf"]


GEMMA_FIELDS = {
    "general.architecture": "gemma3",
    "gemma3.block_count": 18,
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        "<pad>", "<eos>", "<bos>", "<unk>", "  ", "<b>", "<0x41>", "ab", "abc", "a", "b", "c", "\u2581",
    ],
    "tokenizer.ggml.scores": [-1000.0] * 6 + [0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0],
    "tokenizer.ggml.token_type": [3, 3, 3, 3, 4, 4, 6, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": False,
}  # fmt: skip


def test_a_sentencepiece_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "x.gguf", tmp_path, GEMMA_FIELDS)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = tokenizer.encode("abc  <b>A cab").tokens
    assert tokens == ["<bos>", "abc", "\u2581\u2581", "<b>", "<0x41>", "\u2581", "c", "ab"]
    assert tokenizer.decode(tokenizer.encode("abc  <b>A cab").ids) == "abc  <b>A cab"
    assert tokenizer.token_to_id("<eos>") == 1


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("tokenizer.ggml.model", "bert", "tokenizer 'bert'"),
        ("tokenizer.ggml.add_eos_token", True, "tokenizer 'llama'"),
        ("tokenizer.ggml.add_space_prefix", True, "tokenizer 'llama'"),
        ("tokenizer.ggml.scores", [0.0] * 8 + [1.0] * 5, "order of its scores"),
        ("general.architecture", "llama", "tokenizer 'llama'"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(tmp_path: Path, key: str, value: object, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        write_tokenizer(tmp_path / "x.gguf", tmp_path, {**GEMMA_FIELDS, key: value})
    assert caught.value.fault is CheckpointFault.UNSUPPORTED
    assert not list(tmp_path.iterdir())


def test_architectures() -> None:
    source = Path("/m/x.gguf")
    gemma = architecture_of(source, GEMMA_FIELDS)
    assert gemma.name(source, "blk.7.post_ffw_norm.weight") == "model.layers.7.post_feedforward_layernorm.weight"
    ones = np.ones((2, 2), np.float32)
    assert not gemma.restore("model.norm.weight", ones, {}).any()
    assert np.array_equal(gemma.restore("model.layers.0.self_attn.q_proj.weight", ones, {}), ones)
    with pytest.raises(CheckpointError, match="attn_bias"):
        gemma.name(source, "blk.0.attn_bias.weight")
    with pytest.raises(CheckpointError, match="mamba"):
        architecture_of(source, {"general.architecture": "mamba"})
    with pytest.raises(CheckpointError, match="27B"):
        architecture_of(source, {**GEMMA_FIELDS, "gemma3.block_count": 62})
