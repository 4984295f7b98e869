"""GGUF to a bf16 Hugging Face checkpoint (Llama family).

The ``gguf`` package reads and dequantises; names and layout are mapped here. llama.cpp
stores the rows of q and k permuted for its rotary embedding, so they are permuted back
(the inverse of ``LlamaModel.permute`` in llama.cpp's convert_hf_to_gguf.py). The
tokenizer is rebuilt from the GGUF's vocabulary and merges (byte-level BPE).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.bindings.checkpoint.writer import write_safetensors

_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_TOKEN_TYPE_CONTROL: Final = 3
_SMOLLM_SPLIT: Final = ("smollm", "smollm2")


@dataclass(frozen=True)
class Conversion:
    """What a conversion wrote.

    Attributes:
        directory: the checkpoint.
        tensors: their number.
        nbytes: bytes of tensor data.

    """

    directory: Path
    tensors: int
    nbytes: int


def convert_gguf(source: Path, directory: Path, progress: Callable[[int, int], None]) -> Conversion:
    """Write a GGUF file as a bf16 checkpoint directory.

    The directory appears complete or not at all: it is written under a temporary name
    beside its place, synced, and renamed.

    Args:
        source: the GGUF file.
        directory: must not exist.
        progress: called with (bytes done, bytes in all) of tensor data.

    Raises:
        CheckpointError: not a GGUF, or one of an unsupported architecture or tokenizer.
        FileExistsError: the directory exists.

    """
    reader = _open(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            CheckpointFault.UNSUPPORTED,
            source,
            f"architecture {architecture!r}",
            "only 'llama' GGUF files convert",
        )
    if directory.exists():
        raise FileExistsError(directory)
    temporary = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        tensors = {_hf_name(source, tensor.name): tensor for tensor in reader.tensors}
        _write_json(temporary / "config.json", _config(fields, tied="lm_head.weight" not in tensors))
        _write_tokenizer(source, temporary, fields)
        nbytes = _write_weights(temporary / "model.safetensors", tensors, fields, progress)
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Conversion(directory, len(tensors), nbytes)


def _open(source: Path) -> Any:
    try:
        from gguf import GGUFReader  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise CheckpointError(
            CheckpointFault.UNSUPPORTED,
            source,
            "reading GGUF needs the 'gguf' package",
            "pip install 'rowlock[convert]'",
        ) from error
    try:
        return GGUFReader(source)
    except FileNotFoundError:
        raise CheckpointError(CheckpointFault.NOT_FOUND, source, "no such file") from None
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise CheckpointError(CheckpointFault.MALFORMED, source, f"not a GGUF file: {error}") from error


def _hf_name(source: Path, name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise CheckpointError(CheckpointFault.UNSUPPORTED, source, f"unknown tensor {name!r}")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.weight"


def _config(fields: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    def get(key: str) -> Any:
        return fields[f"llama.{key}"]

    heads, hidden = get("attention.head_count"), get("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("llama.attention.head_count_kv", heads),
        "head_dim": fields.get("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": round(float(get("attention.layer_norm_rms_epsilon")), 12),
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(source: Path, directory: Path, fields: dict[str, Any]) -> None:
    if fields.get("tokenizer.ggml.model") != "gpt2" or fields.get("tokenizer.ggml.pre") not in _SMOLLM_SPLIT:
        raise CheckpointError(
            CheckpointFault.UNSUPPORTED,
            source,
            f"tokenizer {fields.get('tokenizer.ggml.model')!r}/{fields.get('tokenizer.ggml.pre')!r}",
            "only byte-level BPE of the SmolLM kind converts",
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    special = [index for index, kind in enumerate(kinds) if kind == _TOKEN_TYPE_CONTROL]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    _write_json(
        directory / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": index, "content": tokens[index], **flags} for index in special],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: index for index, token in enumerate(tokens)},
                "merges": fields["tokenizer.ggml.merges"],
            },
        },
    )
    names = {
        f"{role}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if fields.get(f"tokenizer.ggml.{key}_token_id") is not None
    }
    template = fields.get("tokenizer.chat_template")
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
            "clean_up_tokenization_spaces": False,
            **names,
            **({"chat_template": template} if template else {}),
        },
    )
    ids = {
        f"{role}_token_id": fields[f"tokenizer.ggml.{role}_token_id"]
        for role in ("bos", "eos")
        if fields.get(f"tokenizer.ggml.{role}_token_id") is not None
    }
    _write_json(directory / "generation_config.json", ids)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _write_weights(
    path: Path, tensors: dict[str, Any], fields: dict[str, Any], progress: Callable[[int, int], None]
) -> int:
    """Stream the tensors, one at a time in memory, in name order; their bytes in all."""
    infos = [
        TensorInfo(name, "BF16", tuple(int(size) for size in reversed(tensors[name].shape))) for name in sorted(tensors)
    ]
    total = sum(info.nbytes for info in infos)

    def data() -> Iterator[bytes]:
        done = 0
        for info in infos:
            yield to_bf16(_dequantised(info, tensors[info.name], fields)).tobytes()
            done += info.nbytes
            progress(done, total)

    write_safetensors(path, infos, data(), {"format": "pt"})
    return total


def _dequantised(info: TensorInfo, tensor: Any, fields: dict[str, Any]) -> npt.NDArray[np.float32]:
    from gguf import dequantize  # noqa: PLC0415 - an optional dependency

    values: npt.NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).reshape(info.shape)
    heads = fields["llama.attention.head_count"]
    if info.name.endswith("q_proj.weight"):
        return _unpermute(values, heads)
    if info.name.endswith("k_proj.weight"):
        return _unpermute(values, fields.get("llama.attention.head_count_kv", heads))
    return values


def _unpermute(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    rows, columns = values.shape
    half = rows // heads // 2
    return values.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, ties to even; NaN stays NaN (quieted)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")
