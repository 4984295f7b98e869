"""Plans: what a transition would do, as data."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any

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
    """Where the before-images of a transition are kept: a file, memory; or a file that nothing leads back to."""

    NONE = "NONE"
    DURABLE = "DURABLE"
    MEMORY = "MEMORY"
    EVIDENCE = "EVIDENCE"


class Verify(StrEnum):
    """How much is read back from the device before the target is published."""

    PARENTS = "PARENTS"
    GROUPS = "GROUPS"
    ALL = "ALL"


class TargetCheck(StrEnum):
    """How much of the target is digested before the drain."""

    WHOLE = "WHOLE"
    STAGED = "STAGED"


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
        by_digest: touched parents are proved by digest, since images of them would not fit
            the memory bound; that takes longer inside the pause.

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
    verify: Verify = Verify.PARENTS
    target_check: TargetCheck = TargetCheck.WHOLE
    by_digest: bool = False

    @property
    def unread_bytes(self) -> int:
        """Bytes of touched parents that are not read back before the publish."""
        return self.parent_bytes - self.bytes_max if self.verify is Verify.GROUPS and self.level is Level.B2 else 0

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
        content = _fields(self)
        content.pop("predicted_pause_ms")
        hasher = blake3(derive_key_context="rowlock v1 plan")
        hasher.update(json.dumps(content, sort_keys=True, default=_fields).encode())
        return hasher.hexdigest()

    @cached_property
    def summary(self) -> dict[str, Any]:
        """JSON-able values: group lists become counts, and the digest is among them."""
        left_out = {"from_identity", "to_identity"}
        values = {name: value for name, value in _fields(self).items() if name not in left_out}
        values["changes"] = [{**_fields(item), "groups": len(item.groups)} for item in self.changes]
        values["blockers"] = [_fields(item) for item in self.blockers]
        return {**values, "digest": self.digest}


def _fields(value: Any) -> dict[str, Any]:
    """A dataclass as JSON takes it; unlike ``asdict`` it copies no list of groups."""
    stored = vars(value)
    return {item.name: stored[item.name] for item in fields(value)}
