"""The planner. Pure: it reads nothing and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rowlock.bindings.model.layout import BlockReason, Layout
from rowlock.bindings.plan import (
    Blocker,
    Level,
    Model,
    Plan,
    PlanRefusedError,
    Require,
    TargetCheck,
    TensorChange,
    UndoStore,
    Verify,
)

RECORD_BYTES: Final = 1024 * 1024
"""State-directory space for journal rows of one transition, reserved with the undo."""


@dataclass(frozen=True)
class Policy:
    """What the operator has configured, and the caller wants, as far as it shapes a plan.

    Attributes:
        require: the level wanted.
        verify: how much is read back.
        target_check: how much of the target is digested.
        undo_durable_max: bytes up to which the undo is a durable file.
        image_bytes_max: bytes of touched parents up to which whole images of them are kept in
            host memory; beyond, they are proved by digest.
        rebuildable: the resident identity can be rebuilt from a held, hashed checkpoint.
        compare_bytes_per_s: reading back and comparing, for the prediction.
        digest_bytes_per_s: reading back and hashing, for the prediction.
        load_bytes_per_s: closing, creating, uploading and reading back, for the prediction.

    """

    require: Require = Require.AUTO
    verify: Verify = Verify.PARENTS
    target_check: TargetCheck = TargetCheck.WHOLE
    undo_durable_max: int = 64 * 1024 * 1024
    image_bytes_max: int = 16 * 1024**3
    rebuildable: bool = True
    compare_bytes_per_s: float = 7e9
    digest_bytes_per_s: float = 3e9
    load_bytes_per_s: float = 2.5e9


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
    if resident.layout.artifact is not None or target.layout.artifact is not None:
        return [Blocker("", BlockReason.B1_ONLY_BINDING, "compiled graphs carry their weights: they are loaded whole")]
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
            rows = tensor.info.rows_of(groups)
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
    by_digest = parents > policy.image_bytes_max
    return _plan(
        resident,
        target,
        generation,
        Level.B2,
        _why_in_place(changes, bytes_max, resident.manifest.nbytes),
        changes=changes,
        parent_bytes=parents,
        # what is there, and what shall be: of whole parents, or of the changed groups alone
        memory_bytes=2 * (bytes_max if by_digest else parents),
        disk_bytes=RECORD_BYTES + (bytes_max if undo is UndoStore.DURABLE else 0),
        predicted_pause_ms=_predicted_pause_ms(resident, policy, parents, bytes_max, by_digest=by_digest),
        undo=undo,
        verify=policy.verify,
        target_check=policy.target_check,
        by_digest=by_digest,
    )


def _predicted_pause_ms(resident: Model, policy: Policy, parents: int, bytes_max: int, *, by_digest: bool) -> float:
    rate = policy.digest_bytes_per_s if by_digest else policy.compare_bytes_per_s
    read = bytes_max if policy.verify is Verify.GROUPS else parents
    rest = resident.layout.nbytes - parents if policy.verify is Verify.ALL else 0
    seconds = (bytes_max + read) / rate + rest / policy.digest_bytes_per_s
    return round(2.0 + seconds * 1000, 3)


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
    verify: Verify = Verify.PARENTS,
    target_check: TargetCheck = TargetCheck.WHOLE,
    by_digest: bool = False,
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
        verify=verify,
        target_check=target_check,
        by_digest=by_digest,
    )


def _nbytes(layout: Layout, parents: set[str]) -> int:
    return sum(layout.parents[name].nbytes for name in parents)
