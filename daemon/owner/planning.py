"""Plans, from a frozen view: they change nothing, and never touch the owner thread."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from rowlock.bindings.checkpoint.hashing import Progress, no_progress
from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.plan import Level, Model, Plan, PlanRefusedError, Require, UndoStore
from rowlock.bindings.planner import Policy, plan_transition
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.rebuild import kept_text, rebuild
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.sources import GroupSource
from rowlock.daemon.owner.stores import Stores, still_there
from rowlock.daemon.owner.target import Target, TargetLoader
from rowlock.journal.journal import Journal
from rowlock.journal.rows import GenerationRow
from rowlock.journal.undo import UndoError
from rowlock.v1.errors import OwnerError, Reason

LOADABLE_LOOKED_AT: Final = 4
"""Earlier generations that are looked at, newest first, when the current one cannot be loaded."""


@dataclass(frozen=True)
class Planner:
    """Plans transitions and rollbacks.

    Attributes:
        policy: the operator's; what belongs to one plan is set for each.

    """

    loader: TargetLoader
    stores: Stores
    journal: Journal
    policy: Policy

    def transition(
        self,
        resident: Resident | None,
        directory: Path,
        require: Require,
        options: Options,
        progress: Progress = no_progress,
    ) -> tuple[Plan, Target]:
        """What a transition to a checkpoint directory would do, and the target, open.

        Raises:
            OwnerError: the target cannot be used, or the level required cannot be had.

        """
        target = self.loader.open(directory, progress)
        return self.plan(resident, target, require, options), target

    def rollback(self, resident: Resident | None, to: int, options: Options) -> tuple[Plan, Target]:
        """What going back to an earlier generation would do, and that generation as a target.

        From an EMPTY owner it is loaded again from its checkpoint; the current one may be meant then too.

        Args:
            resident: from the view.
            to: the generation; 0 is the newest before the current that is another identity.
            options: of the call.

        Raises:
            OwnerError: ROLLBACK_UNAVAILABLE, saying what is missing.

        """
        current = self.journal.current()
        if current is None:
            raise OwnerError(Reason.EMPTY, "nothing was ever resident, so there is nothing to roll back")
        number = to or self._other_before(current)
        if not number:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"generation {current.generation} is the first")
        wanted = self.journal.generation(number)
        if wanted is None or number > current.generation or (resident is not None and number == current.generation):
            raise OwnerError(
                Reason.ROLLBACK_UNAVAILABLE,
                f"to: generation {number} was never published before {current.generation}",
            )
        target = self._earlier(resident, current, wanted) if resident else self.rebuilt(wanted)
        return self.plan(resident, target, Require.AUTO, options), target

    def rebuilt(self, row: GenerationRow) -> Target:
        """A published generation as a target, whole, from its checkpoint. Raises OwnerError."""
        return rebuild(
            self.stores, self.loader, identity_of(row), Path(row.checkpoint), row.overlay, row.generation
        )  # fmt: skip

    def loadable(self) -> int:
        """The newest generation before the current that is another identity and can be loaded; 0 is none."""
        current = self.journal.current()
        if current is None:
            return 0
        others = [row for row in self.journal.generations() if identity_of(row) != identity_of(current)]
        for row in others[:LOADABLE_LOOKED_AT]:
            try:
                self.rebuilt(row).close()
            except OwnerError:
                continue
            return row.generation
        return 0

    def repair(self, resident: Resident, drifted: Model, options: Options) -> tuple[Plan, Target]:
        """What bringing back the resident identity would do, and that identity as a target, open.

        Args:
            resident: what should be there.
            drifted: what is there.
            options: of the transition.

        Raises:
            OwnerError: the identity cannot be had any more.

        """
        wanted, checkpoint = resident.model.identity, Path(resident.model.checkpoint)
        target = rebuild(self.stores, self.loader, wanted, checkpoint, resident.overlay, resident.generation)
        return self.plan(replace(resident, model=drifted), target, Require.B2, options), target

    def plan(self, resident: Resident | None, target: Target, require: Require, options: Options) -> Plan:
        """Compare; after a refusal the target is closed."""
        rebuildable = resident is not None and still_there(Path(resident.model.checkpoint), resident.stamps)
        policy = replace(
            self.policy,
            require=require,
            verify=options.verify,
            target_check=options.target_check,
            rebuildable=rebuildable,
        )
        generation = resident.generation if resident else 0
        try:
            self.loader.give_way()
            plan = plan_transition(resident.model if resident else None, target.model, generation, policy)
            self.loader.give_way()
            assert plan.summary, "made here, where nobody waits for it, and not by the owner thread"
            return plan
        except PlanRefusedError as error:
            target.close()
            raise OwnerError(Reason.PLAN_REFUSED, str(error)) from error
        except BaseException:
            target.close()
            raise

    def _earlier(self, resident: Resident, current: GenerationRow, wanted: GenerationRow) -> Target:
        """An earlier generation: from the undos between it and now if all are kept, else from its checkpoint."""
        try:
            groups = self._composed_undo(current, wanted)
        except UndoError:
            groups = None
        if groups is None:
            return self.rebuilt(wanted)
        try:
            pushed = self.stores.pushed.read(wanted.overlay) if wanted.overlay else {}
        except UndoError as error:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"pushed rows: {error}") from error
        manifest = self.stores.manifest(wanted.weights)
        model = Model(identity_of(wanted), manifest, resident.model.layout, wanted.checkpoint)
        text = kept_text(self.stores, self.loader.texts, wanted.assets, resident.text.config)
        source = GroupSource({name: tensor.info for name, tensor in manifest.tensors.items()}, groups)
        stamps = self.loader.cache.stamps(Path(wanted.checkpoint), wanted.weights)
        return Target(model, resident.config, text, source, stamps, whole=False, overlay=wanted.overlay, pushed=pushed)

    def _other_before(self, current: GenerationRow) -> int:
        """The newest generation before the current that is another identity: repairs are not gone back over."""
        row: GenerationRow | None = current
        while row is not None and identity_of(row) == identity_of(current):
            row = self.journal.generation(row.previous) if row.previous else None
        return row.generation if row else 0

    def _composed_undo(self, current: GenerationRow, wanted: GenerationRow) -> dict[tuple[str, int], memoryview] | None:
        """The groups of every undo between two generations, older ones over newer; None if one was never kept."""
        groups: dict[tuple[str, int], memoryview] = {}
        for row in self._between(current, wanted):
            if row is None or row.level != Level.B2 or row.undo == UndoStore.MEMORY:
                return None
            if row.undo == UndoStore.DURABLE:
                groups |= self.stores.undo.read(row.transition_id)
        return groups

    def _between(self, current: GenerationRow, wanted: GenerationRow) -> Iterator[GenerationRow | None]:
        """From the current generation down to the one after the wanted; None where the chain breaks."""
        row: GenerationRow | None = current
        while row is not None and row.generation != wanted.generation:
            yield row
            row = self.journal.generation(row.previous) if row.previous else None
        if row is None:
            yield None


def identity_of(row: GenerationRow) -> Identity:
    return Identity(row.program, row.assets, row.weights)
