"""Which rotary embedding a config asks for. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rowlock.bindings.model.fields import Fields


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True)
class Rope:
    """One rotary embedding.

    Attributes:
        theta: its base.
        factor: what positions are divided by (``rope_type: linear``).
        scaling: or which frequencies are divided instead.

    """

    theta: float
    factor: float = 1.0
    scaling: RopeScaling | None = None


THETA: Final = 10000.0


def read_rope(fields: Fields) -> Rope:
    """From ``rope_parameters`` (transformers 5), or from ``rope_theta`` and ``rope_scaling``."""
    return _rope(fields, _parameters(fields), "rope_theta", THETA)


_GLOBAL, _LOCAL = "full_attention", "sliding_attention"


def read_ropes(fields: Fields, theta: float, local_theta: float) -> tuple[Rope, Rope]:
    """Of the layers that look everywhere, and of those that have a window.

    From ``rope_parameters`` by kind of layer, or from ``rope_theta``, ``rope_scaling`` and ``rope_local_base_freq``.

    Args:
        fields: the config.
        theta: base of the first where the config has none.
        local_theta: base of the second.

    """
    parameters = _parameters(fields)
    if not fields.get("rope_parameters"):
        local = Fields(fields.path, {})
        return (
            _rope(fields, parameters, "rope_theta", theta),
            _rope(fields, local, "rope_local_base_freq", local_theta),
        )
    ropes = (
        _rope(fields, parameters.inner(_GLOBAL), "rope_theta", theta),
        _rope(fields, parameters.inner(_LOCAL), "rope_local_base_freq", local_theta),
    )
    parameters.refuse_unknown()
    return ropes


def _parameters(fields: Fields) -> Fields:
    given = [key for key in ("rope_parameters", "rope_scaling") if fields.get(key)]
    if len(given) > 1:
        raise fields.error("rope_scaling", fields.get("rope_scaling"), "only one of rope_parameters and rope_scaling")
    return fields.inner(given[0]) if given else Fields(fields.path, {})


def _rope(fields: Fields, parameters: Fields, theta_key: str, theta: float) -> Rope:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    own = parameters.get("rope_theta") is not None
    outer = fields.number(theta_key, theta)
    base = parameters.number("rope_theta") if own else outer
    rope = Rope(base)
    if kind == "linear":
        rope = Rope(base, factor=parameters.number("factor"))
    elif kind == "llama3":
        rope = Rope(base, scaling=_llama3(parameters))
    elif kind != "default":
        raise parameters.error("rope_type", kind, "'default', 'linear' or 'llama3'")
    parameters.refuse_unknown()
    return rope


def _llama3(parameters: Fields) -> RopeScaling:
    scaling = RopeScaling(
        factor=parameters.number("factor"),
        low_freq_factor=parameters.number("low_freq_factor"),
        high_freq_factor=parameters.number("high_freq_factor"),
        original_context=parameters.size("original_max_position_embeddings"),
    )
    if scaling.low_freq_factor >= scaling.high_freq_factor:
        raise parameters.error("low_freq_factor", scaling.low_freq_factor, "less than high_freq_factor")
    return scaling
