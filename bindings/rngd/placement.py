"""Which tensors of a model can have single rows written, and why the others cannot.

This version puts every parent on one chip, row after row. Other rules are a test option: a daemon
started with a placement file plans as if its tensors lay like that. It is JSON::

    {"host_resident": ["model.norm.weight"], "scaled": [], "shards": {"0.qkv": [[0, 2]]}, "granule_bytes": 1}
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from rowlock.bindings.model.layout import BlockReason, Layout, ParentInfo, Placement
from rowlock.bindings.rngd import sdk
from rowlock.bindings.weights import weight_dtype


@dataclass(frozen=True)
class PlacementRules:
    """How the parents of a model lie on a card.

    Attributes:
        host_resident: tensors that programs read from host memory.
        scaled: tensors whose values mean something only with a partner's scale.
        shards: parent -> ``(axis, parts)`` by which it is split over chips.
        granule_bytes: the least that one transfer may write.

    """

    host_resident: frozenset[str] = frozenset()
    scaled: frozenset[str] = frozenset()
    shards: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    granule_bytes: int = 1


def read_rules(path: Path | None) -> PlacementRules:
    """The rules of a placement file; without one, the plain ones."""
    if path is None:
        return PlacementRules()
    content = json.loads(path.read_text())
    return PlacementRules(
        frozenset(content.get("host_resident", ())),
        frozenset(content.get("scaled", ())),
        {name: tuple((axis, parts) for axis, parts in axes) for name, axes in content.get("shards", {}).items()},
        content.get("granule_bytes", 1),
    )


def placed(layout: Layout, rules: PlacementRules) -> Layout:
    """The layout with every placement marked that rows cannot be written to, and why."""
    by_parent = {name: _blocked_rows(parent, rules) for name, parent in layout.parents.items()}
    return Layout(
        layout.parents,
        {
            name: replace(item, blocked=_blocked_tensor(item, rules) or by_parent[item.parent])
            for name, item in layout.placements.items()
        },
    )


def _blocked_tensor(item: Placement, rules: PlacementRules) -> BlockReason | None:
    if item.tensor.name in rules.host_resident:
        return BlockReason.HOST_RESIDENT
    if item.tensor.name in rules.scaled:
        return BlockReason.SCALED
    return None


def _blocked_rows(parent: ParentInfo, rules: PlacementRules) -> BlockReason | None:
    """LAYOUT where a row is not one run of bytes on every chip; COARSE where a transfer would write neighbours too."""
    dtype = weight_dtype(parent)
    columns = parent.row_bytes // dtype.itemsize
    try:
        shape = sdk.sharded_shape((parent.rows, columns), rules.shards.get(parent.name, ()), dtype)
    except ValueError:  # it cannot be split like that at all
        return BlockReason.LAYOUT
    if shape.intra_chip_sizes != [parent.rows, columns] or shape.intra_chip_strides != [columns, 1]:
        return BlockReason.LAYOUT
    return BlockReason.COARSE if parent.row_bytes % rules.granule_bytes else None
