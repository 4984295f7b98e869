"""Tiny random checkpoints, and changes to them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.gguf import to_bf16
from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.bindings.checkpoint.writer import write_safetensors
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import build_layout

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}

QWEN3: dict[str, Any] = {
    **TINY,
    "model_type": "qwen3",
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
GEMMA3: dict[str, Any] = {
    **{key: value for key, value in TINY.items() if key not in ("hidden_act", "rope_theta")},
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 24,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
FAMILIES = {"llama": TINY, "qwen3": QWEN3, "gemma3": GEMMA3}
"""Configs of a tiny model of each family."""


def write_tiny(directory: Path, seed: int = 0, dtype: str = "BF16", family: str = "llama", **config: Any) -> Path:
    """A tiny model with random weights and a byte-level tokenizer. The seed decides every byte."""
    directory.mkdir(parents=True)
    full = {**FAMILIES[family], **config}
    (directory / "config.json").write_text(json.dumps(full))
    write_tokenizer(directory)
    write_weights(directory, random_tensors(full, seed, dtype))
    return directory


def random_tensors(config: dict[str, Any], seed: int, dtype: str = "BF16") -> dict[TensorInfo, bytes]:
    random = np.random.default_rng(seed)
    layout = build_layout(parse_config(Path(), config), dtype)
    tensors = {}
    for placement in layout.placements.values():
        values = random.normal(0, 0.3, placement.tensor.shape).astype(np.float32)
        if "norm" in placement.tensor.name:
            values = np.abs(values) + np.float32(-0.5 if config["model_type"] == "gemma3_text" else 0.5)
        tensors[placement.tensor] = encode(values, dtype)
    return tensors


def encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        return to_bf16(values).tobytes()
    return values.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes()


def write_weights(directory: Path, tensors: dict[TensorInfo, bytes], name: str = "model.safetensors") -> None:
    (directory / name).unlink(missing_ok=True)
    write_safetensors(directory / name, tensors, tensors.values(), {"format": "pt"})


def write_tokenizer(directory: Path) -> None:
    """Bytes as tokens 0..255, then an end-of-sequence token 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def copy(base: Path, directory: Path) -> Path:
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns(".rowlock"))
    return directory


def change_rows(base: Path, directory: Path, tensor: str, rows: list[int], change: Callable[[bytes], bytes]) -> Path:
    """A copy in which some rows of a tensor are other bytes."""
    copy(base, directory)
    with Checkpoint.open(directory) as checkpoint:
        extent = checkpoint.extents[tensor]
    with open(extent.path, "r+b") as file:
        for row in rows:
            offset = extent.offset + row * extent.tensor.row_bytes
            file.seek(offset)
            old = file.read(extent.tensor.row_bytes)
            file.seek(offset)
            file.write(change(old))
    return directory


def negate(row: bytes) -> bytes:
    """Flip the sign of every bf16 value."""
    values = np.frombuffer(row, np.uint16) ^ np.uint16(0x8000)
    return values.tobytes()


def read_tensor(directory: Path, tensor: str) -> bytes:
    with Checkpoint.open(directory) as checkpoint:
        out = np.empty(checkpoint.tensors[tensor].nbytes, np.uint8)
        checkpoint.read_into(tensor, 0, out)
    return out.tobytes()


EMBED = "model.embed_tokens.weight"
Q0 = "model.layers.0.self_attn.q_proj.weight"
K0 = "model.layers.0.self_attn.k_proj.weight"
NORM = "model.norm.weight"


def write_artifact(
    directory: Path, weights: bytes = b"weights", config: dict[str, Any] | None = None, **settings: Any
) -> Path:
    """A directory of graphs compiled for ATOM, for the double of rebel-compiler: any bytes are weights."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({**TINY, **(config or {})}))
    write_tokenizer(directory)
    full = {
        "batch_size": 1,
        "kvcache_block_size": 16,
        "kvcache_num_blocks": 4,
        "logits_to_keep": 1,
        "max_seq_len": 64,
        "prefill_chunk_size": 4,
        "use_attention_mask": False,
        **settings,
    }
    (directory / "rbln_config.json").write_text(json.dumps(full))
    for name in ("prefill", "decoder_batch_1"):
        (directory / f"{name}.rbln").write_bytes(name.encode() + b"\n" + weights)
    return directory
