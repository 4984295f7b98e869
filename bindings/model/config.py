"""A checkpoint's config, as far as the decoder understands it. Free of torch.

Whatever the decoder would have to guess is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rowlock.bindings.checkpoint.config import tied_aliases
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault

NUMBER_MAX: Final = 1e30
_IGNORED: Final = frozenset(
    {
        "_commit_hash", "_name_or_path", "architectures", "attention_dropout", "bos_token_id", "dtype",
        "eos_token_id", "initializer_range", "is_llama_config", "model_type", "pad_token_id",
        "pretraining_tp", "rope_interleaved", "torch_dtype", "transformers.js_config",
        "transformers_version", "use_cache",
    }
)  # fmt: skip
_MUST_BE: Final[dict[str, tuple[Any, ...]]] = {
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
}


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama-family decoder.

    Attributes:
        context: the longest sequence, in tokens.
        rope_theta: base of the rotary embedding.

    """

    family: Literal["llama"]
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of each layer: how many positions a token may look at, its own included; None: all of them."""
        return (None,) * self.layers

    @property
    def q_rows(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.kv_heads * self.head_dim


class _Fields:
    """Typed reads from a config, each leaving its key marked as understood."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self.read: set[str] = set()

    def size(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int or not 0 < value < 2**31:
            raise self.error(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < NUMBER_MAX:
            raise self.error(key, value, "a positive number")
        return float(value)

    def error(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(
            CheckpointFault.UNSUPPORTED,
            self.path,
            f"{key} is {str(value)[:80]!r}; this decoder needs {wanted}",
        )

    def _get(self, key: str, default: Any) -> Any:
        self.read.add(key)
        value = self.config.get(key)
        return default if value is None else value


def parse_config(directory: Path, config: dict[str, Any]) -> ModelConfig:
    """Understand a config, or say what is not understood.

    Args:
        directory: for error messages.
        config: parsed ``config.json``.

    Raises:
        CheckpointError: UNSUPPORTED, naming the key, its value and what is supported.

    """
    path = directory / "config.json"
    fields = _Fields(path, config)
    family = config.get("model_type")
    if family != "llama":
        raise fields.error("model_type", family, "'llama'")
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    scaling_keys = {"rope_scaling", "rope_parameters", "rope_theta"}
    theta, scaling = _rope(fields)
    result = ModelConfig(
        family="llama",
        vocab=fields.size("vocab_size"),
        hidden=hidden,
        intermediate=fields.size("intermediate_size"),
        layers=fields.size("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=fields.size("head_dim", hidden // heads if hidden % heads == 0 else None),
        context=fields.size("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps"),
        rope_theta=theta,
        rope_scaling=scaling,
        tied=bool(tied_aliases(config)),
    )
    if type(config.get("tie_word_embeddings", False)) is not bool:
        raise fields.error("tie_word_embeddings", config["tie_word_embeddings"], "true or false")
    if result.heads % result.kv_heads:
        raise fields.error("num_key_value_heads", result.kv_heads, f"a divisor of {result.heads} heads")
    if result.head_dim % 2:
        raise fields.error("head_dim", result.head_dim, "an even number")
    _refuse_unknown(fields, fields.read | scaling_keys | {"tie_word_embeddings"})
    return result


_LLAMA3_KEYS: Final = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """Theta and scaling, from ``rope_parameters`` (transformers 5) or the older two keys."""
    config = fields.config
    given = [key for key in ("rope_parameters", "rope_scaling") if config.get(key)]
    if len(given) > 1:
        raise fields.error("rope_scaling", config["rope_scaling"], "only one of rope_parameters and rope_scaling")
    parameters = config[given[0]] if given else {}
    if not isinstance(parameters, dict):
        raise fields.error(given[0], parameters, "an object")
    theta = parameters.get("rope_theta")
    theta = config.get("rope_theta") if theta is None else theta
    inner = _Fields(fields.path, {**parameters, "rope_theta": 10000.0 if theta is None else theta})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in {"default", "llama3"}:
        raise fields.error("rope_type", kind, "'default' or 'llama3'")
    known = {"rope_theta", "rope_type", "type"} | (_LLAMA3_KEYS if kind == "llama3" else set())
    for key in parameters:
        if key not in known:
            raise fields.error(f"{given[0]}.{key}", parameters[key], "this key to be absent")
    if kind == "default":
        return inner.number("rope_theta"), None
    scaling = RopeScaling(
        factor=inner.number("factor"),
        low_freq_factor=inner.number("low_freq_factor"),
        high_freq_factor=inner.number("high_freq_factor"),
        original_context=inner.size("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise fields.error("low_freq_factor", scaling.low_freq_factor, "less than high_freq_factor")
    return inner.number("rope_theta"), scaling


def _refuse_unknown(fields: _Fields, understood: set[str]) -> None:
    for key, value in fields.config.items():
        if key in _MUST_BE:
            if value not in _MUST_BE[key]:
                raise fields.error(key, value, " or ".join(repr(item) for item in _MUST_BE[key]))
        elif key not in understood and key not in _IGNORED and value not in (None, False):
            raise fields.error(key, value, "this key to be absent: it is not known to be harmless")
