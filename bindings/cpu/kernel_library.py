"""The compiled kernels of ``kernels/``, and the pool of threads that they run on."""

from __future__ import annotations

import ctypes
import importlib.util
from ctypes import POINTER, Structure, c_float, c_int, c_long, c_void_p
from typing import Final

LAYER_WEIGHTS: Final = (
    "input_norm", "qkv", "q_norm", "k_norm", "o", "o_norm", "post_norm", "gate_up", "down", "down_norm",
)  # fmt: skip
"""Parents of one layer, in the order of ``decoder_layer``."""
ROPES_MAX: Final = 2


class DecoderLayer(Structure):
    """``decoder_layer`` of ``decode.h``."""

    _fields_ = [*((name, c_void_p) for name in LAYER_WEIGHTS), ("window", c_long), ("rope", c_long)]


class DecoderModel(Structure):
    """``decoder`` of ``decode.h``."""

    _fields_ = [
        *((name, c_long) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")),
        ("norms_from_one", c_long),
        *((name, c_float) for name in ("norm_eps", "query_scale", "embed_scale")),
        *((name, c_void_p) for name in ("activation", "embed", "norm", "head")),
        ("layer", POINTER(DecoderLayer)),
    ]


class Rotation(Structure):
    """``rotation`` of ``decode.h``."""

    _fields_ = [("cosine", c_void_p), ("sine", c_void_p)]


class LayerPages(Structure):
    """``layer_pages`` of ``decode.h``."""

    _fields_ = [("pages", c_void_p), ("group", c_long)]


class DecoderSequence(Structure):
    """``decoder_sequence`` of ``decode.h``."""

    _fields_ = [
        ("layers", POINTER(LayerPages)),
        ("tables", POINTER(c_void_p)),
        *((name, c_long) for name in ("page_tokens", "length", "prompt", "count")),
        ("tokens", c_void_p),
        ("rotations", Rotation * ROPES_MAX),
    ]


class DecoderLayers(Structure):
    """``decoder_layers`` of ``decode.h``."""

    _fields_ = [("first", c_long), ("stop", c_long), ("hidden", c_void_p)]


class AttentionRows(Structure):
    """``attention_rows`` of ``attention.h``."""

    _fields_ = [*((name, c_long) for name in ("first", "count", "prompt", "window")), ("scale", c_float)]


class PagedRows(Structure):
    """``paged_rows`` of ``attention.h``."""

    _fields_ = [
        ("keys", c_void_p),
        ("table", c_void_p),
        *((name, c_long) for name in ("values", "page_tokens", "page_stride")),
    ]


def load_kernels() -> ctypes.CDLL | None:
    """The kernels; None when this installation has none, or this machine cannot run them."""
    spec = importlib.util.find_spec("rowlock.bindings.cpu._kernels")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    signatures = {
        "linear_supported": (c_int, []),
        "pool_create": (c_void_p, [c_int]),
        "pool_destroy": (None, [c_void_p]),
        "linear": (None, [*[c_void_p] * 5, *[c_long] * 3]),
        "attend": (
            None,
            [AttentionRows, c_long, c_long, c_void_p, c_long, POINTER(PagedRows), c_void_p, c_long],
        ),
        "decode_workspace": (c_long, [POINTER(DecoderModel), c_long]),
        "decode": (
            None,
            [
                c_void_p,
                POINTER(DecoderModel),
                DecoderLayers,
                POINTER(DecoderSequence),
                c_long,
                c_void_p,
                c_void_p,
            ],
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library if library.linear_supported() else None


class Kernels:
    """The kernels on threads of their own. One caller at a time.

    Attributes:
        library: the compiled functions.
        pool: their first argument.

    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library = library
        self.pool = library.pool_create(threads)
        if not self.pool:
            raise MemoryError(f"cannot start {threads} threads")

    def __del__(self) -> None:
        self.library.pool_destroy(self.pool)
