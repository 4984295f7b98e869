"""What the architectures of GGUF files are as Hugging Face checkpoints: names, config, values stored otherwise."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault

Values = npt.NDArray[np.float32]
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
_GEMMA_NAMES: Final = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_27B_LAYERS: Final = 62
"""Its queries are scaled otherwise, which a GGUF does not say."""


@dataclass(frozen=True)
class Architecture:
    """One kind of GGUF file.

    Attributes:
        layer_names: what a tensor of a layer is called in a checkpoint.
        config: makes the family's own part of ``config.json``, from the fields of the file.
        restore: of a tensor (its name in the checkpoint, its values, the fields): the values of the checkpoint.

    """

    layer_names: Mapping[str, str]
    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    restore: Callable[[str, Values, Mapping[str, Any]], Values]

    def name(self, source: Path, name: str) -> str:
        """A tensor's name in the checkpoint. Raises CheckpointError when it is not known."""
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match is None or match[2] not in self.layer_names:
            raise CheckpointError(CheckpointFault.UNSUPPORTED, source, f"unknown tensor {name!r}")
        return f"model.layers.{match[1]}.{self.layer_names[match[2]]}.weight"


def architecture_of(source: Path, fields: Mapping[str, Any]) -> Architecture:
    """How to convert a file of these fields. Raises CheckpointError when its architecture is not known."""
    name = fields.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise CheckpointError(
            CheckpointFault.UNSUPPORTED,
            source,
            f"architecture {name!r}",
            f"only {' and '.join(repr(known) for known in _ARCHITECTURES)} GGUF files convert",
        )
    if name == "gemma3" and fields["gemma3.block_count"] == _GEMMA_27B_LAYERS:
        raise CheckpointError(
            CheckpointFault.UNSUPPORTED, source, "Gemma 3 27B: the file does not say all of its config"
        )
    return _ARCHITECTURES[name]


def model_config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """``config.json`` of a file whose architecture is known."""
    kind = fields["general.architecture"]

    def get(key: str) -> Any:
        return fields[f"{kind}.{key}"]

    heads, hidden = get("attention.head_count"), get("embedding_length")
    return {
        **_ARCHITECTURES[kind].config(fields),
        "attention_bias": False,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get(f"{kind}.attention.head_count_kv", heads),
        "head_dim": fields.get(f"{kind}.attention.key_length", hidden // heads),
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": round(float(get("attention.layer_norm_rms_epsilon")), 12),
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


def _llama_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "mlp_bias": False,
        "rope_theta": float(fields.get("llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
    }


def _gemma_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp takes for granted is added: one layer in six looks everywhere, the others rotate by base 10000."""
    factor = fields.get("gemma3.rope.scaling.factor")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": fields["gemma3.attention.key_length"],
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "sliding_window_pattern": 6,
        "rope_theta": float(fields["gemma3.rope.freq_base"]),
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": float(factor)} if factor else None,
        "final_logit_softcapping": fields.get("gemma3.final_logit_softcapping"),
    }


def _restore_llama(name: str, values: Values, fields: Mapping[str, Any]) -> Values:
    """llama.cpp stores the rows of q and k permuted for its rotary embedding.

    The inverse of ``LlamaModel.permute`` in llama.cpp's convert_hf_to_gguf.py.
    """
    heads = fields["llama.attention.head_count"]
    if name.endswith("q_proj.weight"):
        return unpermute(values, heads)
    if name.endswith("k_proj.weight"):
        return unpermute(values, fields.get("llama.attention.head_count_kv", heads))
    return values


def _restore_gemma(name: str, values: Values, _fields: Mapping[str, Any]) -> Values:
    """llama.cpp adds 1 to the weights of norms."""
    return values - np.float32(1) if name.endswith("norm.weight") else values


def unpermute(values: Values, heads: int) -> Values:
    """Rows ``[heads, head_dim / 2, 2]`` as ``[heads, 2, head_dim / 2]``."""
    rows, columns = values.shape
    half = rows // heads // 2
    return values.reshape(heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


_ARCHITECTURES: Final = {
    "llama": Architecture(_LAYER_NAMES, _llama_config, _restore_llama),
    "gemma3": Architecture({**_LAYER_NAMES, **_GEMMA_NAMES}, _gemma_config, _restore_gemma),
}
