"""Forward passes through one compiled function.

A step is some thousand small operations; from Python each costs more than it computes, and the interpreter's
lock is taken and given for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import Array, c_void_p
from typing import Final
from weakref import WeakKeyDictionary

import torch

from rowlock.bindings.cpu.kernel_library import (
    LAYER_WEIGHTS,
    DecoderLayer,
    DecoderLayers,
    DecoderModel,
    DecoderSequence,
    Kernels,
    LayerPages,
    Rotation,
)
from rowlock.bindings.device import Counters
from rowlock.bindings.model.cache.geometry import SPAN_TOKENS
from rowlock.bindings.model.cache.paged import PagedCache
from rowlock.bindings.model.cache.table import BlockTable
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.decoder import Decoder, Span, activation, embed_scale

HEAD_DIM_MAX: Final = 256
HIDDEN_MAX: Final = 8192
LANES: Final = 8
GROUP_MAX: Final = 32
KEY_BLOCK: Final = 512
FEW_KEYS: Final = 12
FIRST_PART: Final = 192


def supported(config: ModelConfig) -> bool:
    """Whether the compiled function can run a bfloat16 model of these sizes."""
    return (
        config.head_dim <= HEAD_DIM_MAX
        and config.head_dim % LANES == 0
        and config.heads // config.kv_heads <= GROUP_MAX
        and config.hidden <= HIDDEN_MAX
    )


def all_numbers() -> torch.Tensor:
    """``[65536]``: every bfloat16, in the order of their bits."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def _layer(config: ModelConfig, weights: Mapping[str, torch.Tensor], layer: int) -> DecoderLayer:
    found = (weights.get(f"{layer}.{name}") for name in LAYER_WEIGHTS)
    pointers = (None if weight is None else weight.data_ptr() for weight in found)
    return DecoderLayer(*pointers, config.windows[layer] or 0, config.rope_index(layer))


def settled_tokens(prompt: int) -> int:
    """Leading tokens of a prompt that no longer one would compute in another order.

    What decides on the order is the last block of keys, which may be few, is added in parts that depend on its size,
    and ends in what is no whole vector: see ``attend_tile``, ``weigh_parts`` and ``exponentials`` of ``attention.c``.
    """
    block = prompt % KEY_BLOCK
    if block < FEW_KEYS:
        return prompt - block
    if FIRST_PART < block < 2 * FIRST_PART:
        return prompt - block + block // 2
    return prompt - block % LANES


class NativeDecoder:
    """A :class:`rowlock.bindings.model.decoder.Decoder` in compiled code, with the same bits.

    A prompt gives the same however it is cut in spans: what it would give in one.

    Args:
        decoder: over the same weights.
        weights: resident tensors by parent name; they must not move.
        kernels: of this machine.
        counters: of the working memory that it makes.

    """

    def __init__(
        self, decoder: Decoder, weights: Mapping[str, torch.Tensor], kernels: Kernels, counters: Counters
    ) -> None:
        self._counters = counters
        self._decoder = decoder
        self._weights = weights  # keeps the memory that the model points to
        self._kernels = kernels
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._pages: WeakKeyDictionary[PagedCache, Array[LayerPages]] = WeakKeyDictionary()
        config = decoder.config
        self._activation = activation(config)(all_numbers())
        layers = (DecoderLayer * config.layers)(*(_layer(config, weights, layer) for layer in range(config.layers)))
        self._model = DecoderModel(
            config.layers, config.hidden, config.heads, config.kv_heads, config.head_dim, config.intermediate,
            config.vocab, config.traits.norms_from_one, config.norm_eps, config.query_scale,
            float(embed_scale(config, torch.bfloat16)), self._activation.data_ptr(), weights["embed"].data_ptr(),
            weights["norm"].data_ptr(), weights["embed" if config.tied else "head"].data_ptr(), layers,
        )  # fmt: skip

    @property
    def config(self) -> ModelConfig:
        return self._decoder.config

    @property
    def replayed(self) -> int:
        """As many as any span: each token is computed as if it were alone."""
        return SPAN_TOKENS

    def settled(self, prompt: int) -> int:
        return settled_tokens(prompt)

    def forward(self, spans: Sequence[Span]) -> torch.Tensor:
        """Logits ``[len(spans), vocab]`` of the last token of each; their K/V is added to their tables."""
        return self.forward_layers(spans, range(self.config.layers))

    def forward_layers(self, spans: Sequence[Span], layers: range, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """See :class:`rowlock.bindings.model.decoder.Programs`. ``hidden`` is changed in place."""
        config, total = self.config, sum(len(span.tokens) for span in spans)
        needed = self._kernels.library.decode_workspace(self._model, total)
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(needed, dtype=torch.uint8)
            self._counters.workspaces += 1
        if hidden is None:
            hidden = torch.empty(total, config.hidden, dtype=torch.bfloat16)
        logits = torch.empty(len(spans), config.vocab, dtype=torch.bfloat16)
        rotations = [(cosine.contiguous(), sine.contiguous()) for cosine, sine in self._decoder.rotations(spans)]
        self._kernels.library.decode(
            self._kernels.pool, self._model, DecoderLayers(layers.start, layers.stop, hidden.data_ptr()),
            self._rows(spans, rotations), len(spans), logits.data_ptr(), self._workspace.data_ptr(),
        )  # fmt: skip
        if layers.stop < config.layers:
            return hidden
        for span in spans:
            span.table.advance(len(span.tokens))
        return logits

    def _rows(
        self, spans: Sequence[Span], rotations: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Array[DecoderSequence]:
        rows, start = (DecoderSequence * len(spans))(), 0
        for index, span in enumerate(spans):
            table = span.table
            assert span.tokens.is_contiguous()
            table.check_room(len(span.tokens))
            rows[index] = DecoderSequence(
                self._layer_pages(table.cache), tables_of(table), table.cache.geometry.page_tokens, table.length,
                span.prompt, len(span.tokens), span.tokens.data_ptr(),
                tuple(Rotation(cosine[start].data_ptr(), sine[start].data_ptr()) for cosine, sine in rotations),
            )  # fmt: skip
            start += len(span.tokens)
        return rows

    def _layer_pages(self, cache: PagedCache) -> Array[LayerPages]:
        """Where the pages of each layer lie."""
        if cache not in self._pages:
            self._pages[cache] = (LayerPages * len(cache.places))(
                *(LayerPages(cache.groups[group].states[at].data_ptr(), group) for group, at in cache.places)
            )
        return self._pages[cache]


def tables_of(table: BlockTable) -> Array[c_void_p]:
    """Where the block tables of a sequence lie, by group."""
    return (c_void_p * len(table.pages))(*(pages.ctypes.data for pages in table.pages))
