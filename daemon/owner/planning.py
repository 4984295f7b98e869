"""Plans, from a frozen view: they change nothing, and never touch the owner thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rowlock.bindings.checkpoint.directory import Bytes
from rowlock.bindings.checkpoint.errors import CheckpointError
from rowlock.bindings.checkpoint.hashing import Progress, no_progress
from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.bindings.plan import (
    Level,
    Model,
    Plan,
    PlanRefusedError,
    Policy,
    Require,
    UndoStore,
    plan_transition,
)
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.stores import Stores
from rowlock.daemon.owner.target import Target, TargetLoader, refusal
from rowlock.daemon.owner.text import Text
from rowlock.journal.journal import GenerationRow, Journal
from rowlock.journal.undo import UndoError
from rowlock.v1.errors import OwnerError, Reason


@dataclass(frozen=True)
class Planner:
    """Plans transitions and rollbacks.

    Attributes:
        policy: the operator's; ``require`` and ``rebuildable`` are set for each plan.

    """

    loader: TargetLoader
    stores: Stores
    journal: Journal
    policy: Policy

    def transition(
        self, resident: Resident | None, directory: Path, require: Require, progress: Progress = no_progress
    ) -> tuple[Plan, Target]:
        """What a transition to a checkpoint directory would do, and the target, open.

        Raises:
            OwnerError: the target cannot be used, or the level required cannot be had.

        """
        target = self.loader.open(directory, progress)
        try:
            return self._plan(resident, target, require), target
        except BaseException:
            target.close()
            raise

    def rollback(self, resident: Resident | None) -> tuple[Plan, Target]:
        """What going back to the generation before would do, and that generation as a target.

        Raises:
            OwnerError: ROLLBACK_UNAVAILABLE, saying what is missing.

        """
        current = self.journal.current()
        if resident is None or current is None:
            raise OwnerError(Reason.EMPTY, "nothing is resident, so there is nothing to roll back")
        previous = self.journal.generation(current.previous) if current.previous else None
        if previous is None:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"generation {current.generation} is the first")
        target = self._previous(resident, current, previous)
        try:
            return self._plan(resident, target, Require.AUTO), target
        except BaseException:
            target.close()
            raise

    def _plan(self, resident: Resident | None, target: Target, require: Require) -> Plan:
        rebuildable = resident is not None and self.stores.rebuildable(
            resident.model.identity.weights, Path(resident.model.checkpoint)
        )
        policy = replace(self.policy, require=require, rebuildable=rebuildable)
        generation = resident.generation if resident else 0
        try:
            return plan_transition(resident.model if resident else None, target.model, generation, policy)
        except PlanRefusedError as error:
            raise OwnerError(Reason.PLAN_REFUSED, str(error)) from error

    def _previous(self, resident: Resident, current: GenerationRow, previous: GenerationRow) -> Target:
        """The generation before, from the retained undo if there is one, else from its checkpoint."""
        if current.level == Level.B2 and current.undo != UndoStore.MEMORY:
            return self._from_undo(resident, current, previous)
        target = self.loader.open(Path(previous.checkpoint))
        if target.model.identity != identity_of(previous):
            target.close()
            raise OwnerError(
                Reason.ROLLBACK_UNAVAILABLE,
                f"{previous.checkpoint}: does not hold generation {previous.generation} any more",
            )
        return target

    def _from_undo(self, resident: Resident, current: GenerationRow, previous: GenerationRow) -> Target:
        manifest, stamps = self.stores.manifest(previous.weights)
        model = Model(identity_of(previous), manifest, resident.model.layout, previous.checkpoint)
        try:
            groups = {} if current.undo == UndoStore.NONE else self.stores.undo.read(current.transition_id)
        except UndoError as error:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, str(error)) from error
        try:
            text = Text(self.stores.assets / previous.assets, self.stores.kept_assets(previous.assets))
        except CheckpointError as error:
            raise refusal(error) from error
        source = UndoSource({name: tensor.info for name, tensor in manifest.tensors.items()}, groups)
        return Target(model, resident.config, text, source, stamps, whole=False)


def identity_of(row: GenerationRow) -> Identity:
    return Identity(row.program, row.assets, row.weights)


@dataclass(frozen=True)
class UndoSource:
    """Whole groups of a retained undo, as a source of rows."""

    tensors: Mapping[str, TensorInfo]
    groups: Mapping[tuple[str, int], memoryview]

    def read_into(self, tensor: str, offset: int, out: Bytes) -> None:
        info = self.tensors[tensor]
        group_bytes = info.group_rows * info.row_bytes
        position = 0
        while position < out.nbytes:
            group, within = divmod(offset + position, group_bytes)
            data = self.groups.get((tensor, group))
            if data is None or within:
                raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"the undo lacks group {group} of {tensor}")
            out[position : position + data.nbytes] = np.frombuffer(data, np.uint8)
            position += data.nbytes

    def close(self) -> None:
        """Nothing is open."""
