"""A checkpoint's config, as far as the decoder understands it. Free of torch.

Whatever the decoder would have to guess is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rowlock.bindings.checkpoint.config import tied_aliases
from rowlock.bindings.model.families import FAMILIES, Family
from rowlock.bindings.model.fields import Fields
from rowlock.bindings.model.rope import Rope, read_rope, read_ropes

_HARMLESS: Final = frozenset(
    {
        "_commit_hash", "_name_or_path", "attention_dropout", "bos_token_id", "cache_implementation", "dtype",
        "eos_token_id", "initializer_range", "is_llama_config", "model_type", "pad_token_id",
        "pretraining_tp", "rope_interleaved", "torch_dtype", "transformers.js_config",
        "transformers_version", "use_cache",
    }
)  # fmt: skip
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GEMMA_PATTERN: Final = 6
"""One layer in so many looks everywhere, where a config of Gemma 3 does not say which do."""
_GEMMA_THETAS: Final = (1e6, 1e4)
_QWEN_FIRST: Final = 28
"""The first layer with a window, where a config of Qwen 3 that asks for windows does not say which."""
LAYERS_MAX: Final = 4096


@dataclass(frozen=True)
class ModelConfig:
    """What decides a decoder's programs and the shapes of its weights.

    Attributes:
        family: ``model_type``, a key of :data:`FAMILIES`.
        context: the longest sequence, in tokens.
        query_scale: of the products of queries and keys.
        tied: whether the head is the embedding.
        windows: of each layer: how many positions a token may look at, its own included; None: all of them.
        rope: the rotary embedding.
        local_rope: that of the layers with a window, where it is another one.

    """

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    query_scale: float
    tied: bool
    windows: tuple[int | None, ...]
    rope: Rope
    local_rope: Rope | None = None

    @property
    def traits(self) -> Family:
        return FAMILIES[self.family]

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """Those that there are."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_index(self, layer: int) -> int:
        """Which of :attr:`ropes` a layer uses."""
        return 1 if self.local_rope is not None and self.windows[layer] is not None else 0

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim


def parse_config(directory: Path, config: dict[str, Any]) -> ModelConfig:
    """Understand a config, or say what is not understood.

    Args:
        directory: for error messages.
        config: parsed ``config.json``.

    Raises:
        CheckpointError: UNSUPPORTED, naming the key, its value and what is supported.

    """
    fields = Fields(directory / "config.json", config)
    family = _family(fields)
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    head_dim = fields.size("head_dim", hidden // heads if hidden % heads == 0 else None)
    kv_heads = fields.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
    if head_dim % 2:
        raise fields.error("head_dim", head_dim, "an even number")
    fields.flag("tie_word_embeddings", False)
    _refuse_other_arithmetic(fields, family)
    layers = fields.size("num_hidden_layers")
    if layers > LAYERS_MAX:
        raise fields.error("num_hidden_layers", layers, f"at most {LAYERS_MAX}")
    gemma = family.name == "gemma3_text"
    rope, local_rope = read_ropes(fields, *_GEMMA_THETAS) if gemma else (read_rope(fields), None)
    result = ModelConfig(
        family=family.name,
        vocab=fields.size("vocab_size"),
        hidden=hidden,
        intermediate=fields.size("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=fields.size("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps"),
        query_scale=(fields.number("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
        tied=bool(tied_aliases(config)),
        windows=_WINDOWS[family.name](fields, layers),
        rope=rope,
        local_rope=local_rope,
    )
    fields.refuse_unknown(_HARMLESS)
    return result


def _family(fields: Fields) -> Family:
    name = fields.get("model_type")
    if name not in FAMILIES:
        raise fields.error("model_type", name, " or ".join(repr(known) for known in FAMILIES))
    family = FAMILIES[name]
    architectures = fields.get("architectures", [family.architecture])
    if architectures != [family.architecture]:
        raise fields.error("architectures", architectures, repr(family.architecture))
    return family


def _refuse_other_arithmetic(fields: Fields, family: Family) -> None:
    """Options that would make other programs. Raises CheckpointError."""
    name = fields.get(family.activation_key, family.activation_name)
    if name != family.activation_name:
        raise fields.error(family.activation_key, name, repr(family.activation_name))
    for key in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        if fields.flag(key, False):
            raise fields.error(key, True, "false")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if fields.get(key) is not None:
            raise fields.error(key, fields.get(key), "null: it does not cap logits")


def _windows_of_llama(_fields: Fields, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _windows_of_qwen(fields: Fields, layers: int) -> tuple[int | None, ...]:
    sliding = fields.flag("use_sliding_window", False) and fields.get("sliding_window") is not None
    first = fields.get("max_window_layers", _QWEN_FIRST)
    if type(first) is not int:
        raise fields.error("max_window_layers", first, "an integer")
    windows = _windows(fields, [_SLIDING if sliding and layer >= first else _FULL for layer in range(layers)])
    if any(windows) and not sliding:
        raise fields.error("use_sliding_window", False, "true, where layer_types has layers with a window")
    return windows


def _windows_of_gemma(fields: Fields, layers: int) -> tuple[int | None, ...]:
    pattern = fields.size("sliding_window_pattern", fields.size("_sliding_window_pattern", _GEMMA_PATTERN))
    return _windows(fields, [_SLIDING if (layer + 1) % pattern else _FULL for layer in range(layers)])


_WINDOWS: Final = {
    "llama": _windows_of_llama,
    "qwen3": _windows_of_qwen,
    "gemma3_text": _windows_of_gemma,
}


def _windows(fields: Fields, kinds: list[str]) -> tuple[int | None, ...]:
    """From ``layer_types``, or from what goes for it where it is absent."""
    said = fields.get("layer_types", kinds)
    if not isinstance(said, list) or len(said) != len(kinds) or not {*map(str, said)} <= {_FULL, _SLIDING}:
        raise fields.error("layer_types", said, f"{len(kinds)} of {_FULL!r} or {_SLIDING!r}")
    if _SLIDING not in said:
        fields.get("sliding_window")
        return (None,) * len(kinds)
    window = fields.size("sliding_window")
    return tuple(window if kind == _SLIDING else None for kind in said)
