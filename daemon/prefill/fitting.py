"""Whether a source fits a model: field by field."""

from __future__ import annotations

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout
from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.daemon.prefill.protocol.geometry import Geometry
from rowlock.daemon.prefill.protocol.hello import SourceFacts


def geometry_of(config: ModelConfig, layout: Layout) -> Geometry:
    """The K/V of a model. A window of the whole context hides nothing, and is none."""
    windows = (None if window is None or window >= config.context else window for window in config.windows)
    dtype = layout.parents["embed"].dtype
    return Geometry(dtype, config.kv_heads, config.head_dim, config.vocab, tuple(windows))


def check_fit(facts: SourceFacts, identity: Identity, config: ModelConfig, layout: Layout, mode: Mode) -> None:
    """Refuse a source that computes something else.

    Raises:
        ValueError: naming the field, what it is and what it has to be.

    """
    geometry = geometry_of(config, layout)
    wanted = {
        "program": (facts.program.hex(), identity.program),
        "weights": (facts.weights.hex(), identity.weights),
        "dtype": (facts.geometry.dtype, geometry.dtype),
        "layers": (facts.geometry.layers, geometry.layers),
        "windows": (facts.geometry.windows, geometry.windows),
        "heads": (facts.heads, config.heads),
        "kv_heads": (facts.geometry.kv_heads, geometry.kv_heads),
        "head_dim": (facts.geometry.head_dim, geometry.head_dim),
        "vocab": (facts.geometry.vocab, geometry.vocab),
        "recurrent": (facts.recurrent, False),
        "streams": (facts.streams or mode is Mode.WHOLE, True),
    }
    for name, (found, right) in wanted.items():
        if found != right:
            raise ValueError(f"hello.{name} is {found}; wanted: {right}")
