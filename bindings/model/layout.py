"""Where checkpoint tensors lie in the resident allocations. Free of torch.

::

    checkpoint                                    parent
    model.embed_tokens.weight          ───────>   embed      (the head too, when tied)
    ...self_attn.{q,k,v}_proj.weight   ───────>   L.qkv      rows of q, then k, then v
    ...mlp.{gate,up}_proj.weight       ───────>   L.gate_up  rows of gate, then up
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
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
        return sorted(
            (item for item in self.placements.values() if item.parent == parent),
            key=lambda item: item.first_row,
        )


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


def _parents(config: ModelConfig) -> Iterator[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    hidden, q_rows, kv_rows = config.hidden, config.q_rows, config.kv_rows
    yield "embed", [("model.embed_tokens.weight", (config.vocab, hidden))]
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        yield f"{layer}.input_norm", [(f"{prefix}.input_layernorm.weight", (hidden,))]
        yield (
            f"{layer}.qkv",
            [
                (f"{attention}.q_proj.weight", (q_rows, hidden)),
                (f"{attention}.k_proj.weight", (kv_rows, hidden)),
                (f"{attention}.v_proj.weight", (kv_rows, hidden)),
            ],
        )
        yield f"{layer}.o", [(f"{attention}.o_proj.weight", (hidden, q_rows))]
        yield f"{layer}.post_norm", [(f"{prefix}.post_attention_layernorm.weight", (hidden,))]
        yield (
            f"{layer}.gate_up",
            [
                (f"{mlp}.gate_proj.weight", (config.intermediate, hidden)),
                (f"{mlp}.up_proj.weight", (config.intermediate, hidden)),
            ],
        )
        yield f"{layer}.down", [(f"{mlp}.down_proj.weight", (hidden, config.intermediate))]
    yield "norm", [("model.norm.weight", (hidden,))]
    if not config.tied:
        yield "head", [("lm_head.weight", (config.vocab, hidden))]
