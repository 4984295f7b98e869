"""The planner: what a transition would do. Pure: it reads nothing and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from typing import Final

from blake3 import blake3

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.checkpoint.manifest import Manifest
from rowlock.bindings.model.layout import BlockReason, Layout


class Level(StrEnum):
    """How far a transition has to go."""

    NOOP = "NOOP"
    B2 = "B2"
    B1 = "B1"


class Require(StrEnum):
    """Which level the caller wants: the planner's choice, or one level or nothing."""

    AUTO = "AUTO"
    B2 = "B2"
    B1 = "B1"


class UndoStore(StrEnum):
    """Where the before-images of a transition are kept."""

    NONE = "NONE"
    DURABLE = "DURABLE"
    MEMORY = "MEMORY"


@dataclass(frozen=True)
class Model:
    """One side of a plan: an identity with the manifest and layout behind it.

    Attributes:
        checkpoint: directory that it can be rebuilt from, as a string.

    """

    identity: Identity
    manifest: Manifest
    layout: Layout
    checkpoint: str


@dataclass(frozen=True)
class Policy:
    """What the operator has configured, as far as it shapes a plan.

    Attributes:
        require: the level wanted.
        undo_durable_max: bytes up to which the undo is a durable file.
        rebuildable: the resident identity can be rebuilt from a held, hashed checkpoint.
        copy_bytes_per_s: measured speed of the device's copies, for the prediction.
        load_bytes_per_s: measured speed of a whole load, for the prediction.

    """

    require: Require = Require.AUTO
    undo_durable_max: int = 64 * 1024 * 1024
    rebuildable: bool = True
    copy_bytes_per_s: float = 6e9
    load_bytes_per_s: float = 1e9


@dataclass(frozen=True)
class TensorChange:
    """The groups of one tensor that differ.

    Attributes:
        rows_max: rows in these groups; at most this many differ.
        bytes_max: their bytes.

    """

    tensor: str
    parent: str
    groups: tuple[int, ...]
    rows_max: int
    bytes_max: int


@dataclass(frozen=True)
class Blocker:
    """Why B2 is impossible: one reason for one tensor, or for the model (empty name)."""

    tensor: str
    reason: BlockReason
    detail: str


class PlanRefusedError(Exception):
    """The level that the caller requires is not possible.

    Attributes:
        blockers: why.

    """

    def __init__(self, message: str, blockers: tuple[Blocker, ...]) -> None:
        super().__init__(message)
        self.blockers = blockers


@dataclass(frozen=True)
class Plan:
    """What a transition from one model to another would do.

    Attributes:
        why: why this level, for a person.
        target: checkpoint directory of the new model.
        generation: the generation it starts from.
        changes: what B2 would touch; empty for B1.
        parent_bytes: bytes of the touched parents, read back before and after the write.
        memory_bytes: host memory needed besides the resident model.
        disk_bytes: state-directory space needed.
        irreversible: the old model could not be rebuilt once it is closed.

    """

    level: Level
    why: str
    target: str
    from_identity: Identity | None
    to_identity: Identity
    generation: int
    changes: tuple[TensorChange, ...]
    blockers: tuple[Blocker, ...]
    parent_bytes: int
    memory_bytes: int
    disk_bytes: int
    predicted_pause_ms: float
    irreversible: bool
    undo: UndoStore

    @property
    def groups(self) -> int:
        return sum(len(change.groups) for change in self.changes)

    @property
    def rows_max(self) -> int:
        return sum(change.rows_max for change in self.changes)

    @property
    def bytes_max(self) -> int:
        return sum(change.bytes_max for change in self.changes)

    @property
    def assets_changed(self) -> bool:
        return self.from_identity is None or self.from_identity.assets != self.to_identity.assets

    @cached_property
    def digest(self) -> str:
        """BLAKE3-256, hex, over everything that the plan commits to (not the prediction)."""
        content = asdict(self)
        content.pop("predicted_pause_ms")
        hasher = blake3(derive_key_context="rowlock v1 plan")
        hasher.update(json.dumps(content, sort_keys=True).encode())
        return hasher.hexdigest()


RECORD_BYTES: Final = 1024 * 1024
"""State-directory space for journal rows of one transition, reserved with the undo."""


def plan_transition(resident: Model | None, target: Model, generation: int, policy: Policy) -> Plan:
    """Compare two models and choose a level.

    Args:
        resident: what is on the device, or None when it is empty.
        target: what shall be.
        generation: of the resident model.
        policy: see :class:`Policy`.

    Raises:
        PlanRefusedError: ``policy.require`` cannot be had; the blockers say why.

    """
    if resident is None:
        if policy.require is Require.B2:
            raise PlanRefusedError("B2 needs a resident model; the owner is empty", ())
        return _reload(resident, target, generation, policy, (), "nothing is resident")
    if resident.identity == target.identity and policy.require is not Require.B1:
        return _plan(resident, target, generation, Level.NOOP, "program, assets and weights are equal")
    blockers = tuple(_model_blockers(resident, target))
    changes: tuple[TensorChange, ...] = ()
    if not blockers:
        changes = tuple(_changes(resident, target))
        blockers = tuple(_placement_blockers(resident.layout, changes))
    if policy.require is Require.B1:
        return _reload(resident, target, generation, policy, blockers, "required by the caller")
    if blockers:
        first = blockers[0]
        reason = f"{first.reason.value}: {first.detail}" + (f" ({first.tensor})" if first.tensor else "")
        if policy.require is Require.B2:
            raise PlanRefusedError(f"B2 is not possible: {reason}", blockers)
        return _reload(resident, target, generation, policy, blockers, reason)
    return _in_place(resident, target, generation, policy, changes)


def _model_blockers(resident: Model, target: Model) -> list[Blocker]:
    """Reasons that lie in the shape of the model, the most telling first."""
    old, new = resident.manifest.tensors, target.manifest.tensors
    found = [
        Blocker(name, BlockReason.MISSING, "resident, but not in the target")
        for name in sorted(old.keys() - new.keys())
    ]
    found += [
        Blocker(name, BlockReason.UNEXPECTED, "in the target, but not resident")
        for name in sorted(new.keys() - old.keys())
    ]
    for name in sorted(old.keys() & new.keys()):
        was, will = old[name].info, new[name].info
        if was.dtype != will.dtype:
            found.append(Blocker(name, BlockReason.DTYPE, f"{was.dtype} is resident, the target has {will.dtype}"))
        elif was.shape != will.shape:
            found.append(
                Blocker(
                    name,
                    BlockReason.SHAPE,
                    f"{list(was.shape)} is resident, the target has {list(will.shape)}",
                )
            )
    if resident.identity.program != target.identity.program:
        found.append(Blocker("", BlockReason.PROGRAM_CHANGED, "the configs differ in more than cosmetic keys"))
    elif not found and resident.layout != target.layout:
        found.append(Blocker("", BlockReason.LAYOUT, "the target would be placed differently"))
    return found


def _changes(resident: Model, target: Model) -> list[TensorChange]:
    changes = []
    for name, tensor in resident.manifest.tensors.items():
        groups = tensor.differing_groups(target.manifest.tensors[name])
        if groups:
            spans = [tensor.info.group_span(group) for group in groups]
            rows = sum(stop - first for first, stop in spans)
            parent = resident.layout.placements[name].parent
            changes.append(TensorChange(name, parent, tuple(groups), rows, rows * tensor.info.row_bytes))
    return changes


def _placement_blockers(layout: Layout, changes: tuple[TensorChange, ...]) -> list[Blocker]:
    return [
        Blocker(change.tensor, reason, f"its rows cannot be written in place ({reason.value})")
        for change in changes
        if (reason := layout.placements[change.tensor].blocked) is not None
    ]


def _in_place(
    resident: Model, target: Model, generation: int, policy: Policy, changes: tuple[TensorChange, ...]
) -> Plan:
    parents = _nbytes(resident.layout, {change.parent for change in changes})
    bytes_max = sum(change.bytes_max for change in changes)
    undo = UndoStore.NONE
    if changes:
        undo = UndoStore.DURABLE if bytes_max <= policy.undo_durable_max else UndoStore.MEMORY
    if undo is UndoStore.MEMORY and not policy.rebuildable:
        blocker = Blocker(
            "",
            BlockReason.COST,
            f"an undo of {bytes_max} bytes would have to stay in memory, and the resident identity "
            "cannot be rebuilt from a checkpoint",
        )
        if policy.require is Require.B2:
            raise PlanRefusedError(f"B2 is not possible: {blocker.detail}", (blocker,))
        return _reload(resident, target, generation, policy, (blocker,), blocker.detail)
    pause = 1.0 + (2 * parents + bytes_max) / policy.copy_bytes_per_s * 1000
    return _plan(
        resident,
        target,
        generation,
        Level.B2,
        _why_in_place(changes, bytes_max, resident.manifest.nbytes),
        changes=changes,
        parent_bytes=parents,
        # the image before, the image expected
        memory_bytes=2 * parents,
        disk_bytes=RECORD_BYTES + (bytes_max if undo is UndoStore.DURABLE else 0),
        predicted_pause_ms=round(pause, 3),
        undo=undo,
    )


def _why_in_place(changes: tuple[TensorChange, ...], bytes_max: int, total: int) -> str:
    if not changes:
        return "only the assets differ: no row is written"
    share = 100 * bytes_max / total
    return f"{len(changes)} tensors differ in at most {share:.2f} % of the bytes, all writable in place"


def _reload(
    resident: Model | None,
    target: Model,
    generation: int,
    policy: Policy,
    blockers: tuple[Blocker, ...],
    why: str,
) -> Plan:
    total = target.manifest.nbytes
    return _plan(
        resident,
        target,
        generation,
        Level.B1,
        why,
        blockers=blockers,
        parent_bytes=target.layout.nbytes,
        memory_bytes=total,
        disk_bytes=RECORD_BYTES,
        predicted_pause_ms=round(total / policy.load_bytes_per_s * 1000, 3),
        irreversible=resident is not None and not policy.rebuildable,
    )


def _plan(
    resident: Model | None,
    target: Model,
    generation: int,
    level: Level,
    why: str,
    *,
    changes: tuple[TensorChange, ...] = (),
    blockers: tuple[Blocker, ...] = (),
    parent_bytes: int = 0,
    memory_bytes: int = 0,
    disk_bytes: int = 0,
    predicted_pause_ms: float = 0.0,
    irreversible: bool = False,
    undo: UndoStore = UndoStore.NONE,
) -> Plan:
    return Plan(
        level=level,
        why=why,
        target=target.checkpoint,
        from_identity=resident.identity if resident else None,
        to_identity=target.identity,
        generation=generation,
        changes=changes,
        blockers=blockers,
        parent_bytes=parent_bytes,
        memory_bytes=memory_bytes,
        disk_bytes=disk_bytes,
        predicted_pause_ms=predicted_pause_ms,
        irreversible=irreversible,
        undo=undo,
    )


def _nbytes(layout: Layout, parents: set[str]) -> int:
    return sum(layout.parents[name].nbytes for name in parents)


def touched_parents(plan: Plan) -> Mapping[str, list[TensorChange]]:
    """The changes of a plan by parent, in plan order."""
    result: dict[str, list[TensorChange]] = {}
    for change in plan.changes:
        result.setdefault(change.parent, []).append(change)
    return result
