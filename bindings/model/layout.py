"""Where checkpoint tensors lie in the resident allocations. Free of torch.

::

    checkpoint                                    parent
    model.embed_tokens.weight          ───────>   embed      (the head too, when tied)
    ...self_attn.{q,k,v}_proj.weight   ───────>   L.qkv      rows of q, then k, then v
    ...mlp.{gate,up}_proj.weight       ───────>   L.gate_up  rows of gate, then up

A norm is a parent of one row, named after what it norms: L.q_norm; L.o_norm is of what L.o gives; L.input_norm and
L.post_norm lie in front of the attention and of the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from rowlock.bindings.checkpoint.artifacts import Artifact
from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.bindings.model.config import ModelConfig

WEIGHT_DTYPES: Final = ("BF16", "F16", "F32")


class BlockReason(StrEnum):
    """Why a tensor, or the whole model, cannot be changed by B2."""

    HOST_RESIDENT = "HOST_RESIDENT"
    SCALED = "SCALED"
    HEADER = "HEADER"
    COARSE = "COARSE"
    DTYPE = "DTYPE"
    SHAPE = "SHAPE"
    MISSING = "MISSING"
    UNEXPECTED = "UNEXPECTED"
    LAYOUT = "LAYOUT"
    PROGRAM_CHANGED = "PROGRAM_CHANGED"
    ALIAS = "ALIAS"
    B1_ONLY_BINDING = "B1_ONLY_BINDING"
    COST = "COST"


@dataclass(frozen=True)
class ParentInfo:
    """One device allocation: ``rows`` x ``row_bytes``."""

    name: str
    dtype: str
    rows: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Placement:
    """Where one checkpoint tensor lies: from ``first_row`` of ``parent`` on.

    Attributes:
        blocked: why its rows cannot be written in place, or None.

    """

    tensor: TensorInfo
    parent: str
    first_row: int
    blocked: BlockReason | None = None

    @property
    def offset(self) -> int:
        """Offset in the parent, in bytes."""
        return self.first_row * self.tensor.row_bytes


@dataclass(frozen=True)
class Layout:
    """All parents of a model, and the placement of each tensor, by name.

    Attributes:
        artifact: compiled graphs that carry the weights; then there are neither parents nor placements.

    """

    parents: Mapping[str, ParentInfo]
    placements: Mapping[str, Placement]
    artifact: Artifact | None = None

    @property
    def nbytes(self) -> int:
        return sum(parent.nbytes for parent in self.parents.values())

    def in_parent(self, parent: str) -> list[Placement]:
        """The tensors of one parent, in row order; together they cover it."""
        return self._members.get(parent, [])

    @cached_property
    def _members(self) -> dict[str, list[Placement]]:
        members: dict[str, list[Placement]] = {}
        for item in sorted(self.placements.values(), key=lambda item: item.first_row):
            members.setdefault(item.parent, []).append(item)
        return members


def build_layout(config: ModelConfig, dtype: str) -> Layout:
    """The layout of a model of this config, all of one dtype."""
    parents: dict[str, ParentInfo] = {}
    placements: dict[str, Placement] = {}
    for parent, members in _parents(config):
        row = 0
        for name, shape in members:
            info = TensorInfo(name, dtype, shape)
            placements[name] = Placement(info, parent, row)
            row += info.rows
        parents[parent] = ParentInfo(parent, dtype, row, info.row_bytes)
    return Layout(parents, placements)


def layout_of(checkpoint: Checkpoint, config: ModelConfig) -> Layout:
    """The layout that a checkpoint's own config asks for, which its tensors must fill exactly.

    Raises:
        CheckpointError: MISSING, UNEXPECTED, SHAPE or DTYPE, naming the tensor.

    """
    tensors, path = checkpoint.own_tensors, checkpoint.directory
    if config.layers > len(tensors):
        raise CheckpointError(
            CheckpointFault.MISSING,
            path,
            f"config.json asks for {config.layers} layers (num_hidden_layers), there are only {len(tensors)} tensors",
        )
    dtypes = sorted({info.dtype for info in tensors.values()})
    if len(dtypes) != 1 or dtypes[0] not in WEIGHT_DTYPES:
        raise CheckpointError(
            CheckpointFault.DTYPE,
            path,
            f"holds tensors of dtype {', '.join(dtypes) or 'none'}",
            f"all weights must have one dtype of {', '.join(WEIGHT_DTYPES)}",
        )
    layout = build_layout(config, dtypes[0])
    expected = {name: placement.tensor for name, placement in layout.placements.items()}
    for name in sorted(set(expected) - set(tensors)):
        raise CheckpointError(CheckpointFault.MISSING, path, f"tensor {name!r} is missing, which config.json asks for")
    for name in sorted(set(tensors) - set(expected)):
        raise CheckpointError(
            CheckpointFault.UNEXPECTED,
            checkpoint.extents[name].path,
            f"tensor {name!r} is not part of this model",
        )
    for name, info in expected.items():
        if tensors[name].shape != info.shape:
            raise CheckpointError(
                CheckpointFault.SHAPE,
                checkpoint.extents[name].path,
                f"tensor {name!r} has shape {list(tensors[name].shape)}, config.json asks for {list(info.shape)}",
            )
    return layout


Members = list[tuple[str, tuple[int, ...]]]


def _parents(config: ModelConfig) -> Iterator[tuple[str, Members]]:
    yield "embed", [("model.embed_tokens.weight", (config.vocab, config.hidden))]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        for parent, members in _layer_parents(config):
            yield f"{layer}.{parent}", [(f"{prefix}.{name}.weight", shape) for name, shape in members]
    yield "norm", [("model.norm.weight", (config.hidden,))]
    if not config.tied:
        yield "head", [("lm_head.weight", (config.vocab, config.hidden))]


def _layer_parents(config: ModelConfig) -> Iterator[tuple[str, Members]]:
    hidden, traits = config.hidden, config.traits
    norm = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}
    if traits.product_norms:
        norm |= {
            "o_norm": "post_attention_layernorm",
            "post_norm": "pre_feedforward_layernorm",
            "down_norm": "post_feedforward_layernorm",
        }
    yield "input_norm", [(norm["input_norm"], (hidden,))]
    yield (
        "qkv",
        [
            ("self_attn.q_proj", (config.q_rows, hidden)),
            ("self_attn.k_proj", (config.kv_rows, hidden)),
            ("self_attn.v_proj", (config.kv_rows, hidden)),
        ],
    )
    if traits.head_norms:
        yield "q_norm", [("self_attn.q_norm", (config.head_dim,))]
        yield "k_norm", [("self_attn.k_norm", (config.head_dim,))]
    yield "o", [("self_attn.o_proj", (hidden, config.q_rows))]
    if traits.product_norms:
        yield "o_norm", [(norm["o_norm"], (hidden,))]
    yield "post_norm", [(norm["post_norm"], (hidden,))]
    yield "gate_up", [("mlp.gate_proj", (config.intermediate, hidden)), ("mlp.up_proj", (config.intermediate, hidden))]
    yield "down", [("mlp.down_proj", (hidden, config.intermediate))]
    if traits.product_norms:
        yield "down_norm", [(norm["down_norm"], (hidden,))]
