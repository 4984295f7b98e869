"""A planned transition that asks to begin, and what it becomes when it does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rowlock.bindings.plan import Level, Model, Plan
from rowlock.daemon.owner.chronicle import Chronicle
from rowlock.daemon.owner.core import Core
from rowlock.daemon.owner.in_place import InPlace
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.record import Stopwatch, TransitionRecord
from rowlock.daemon.owner.reload import Reload
from rowlock.daemon.owner.repair import Repair
from rowlock.daemon.owner.states import TransitionState
from rowlock.daemon.owner.target import Target
from rowlock.daemon.owner.transit import Transit
from rowlock.daemon.owner.unloading import Unloading


@dataclass(frozen=True)
class Admission:
    """What a transition is asked to be.

    Attributes:
        kind: ``load``, ``transition``, ``rollback``, ``push``, ``repair`` or ``unload``.
        plan: None for an unload.
        target: None for an unload.
        request_id: the caller's, or empty.
        request_digest: of what the caller asked for, to notice a reused id.
        etag: of the owner, as the caller saw it, or empty.
        drifted: of a repair: the model that is really there.

    """

    kind: str
    plan: Plan | None
    target: Target | None
    options: Options
    request_id: str = ""
    request_digest: str = ""
    etag: str = ""
    drifted: Model | None = None

    def close(self) -> None:
        if self.target is not None:
            self.target.close()


def new_record(admission: Admission, core: Core) -> TransitionRecord:
    """The record of a transition that is just beginning."""
    plan, resident = admission.plan, core.resident
    there = resident.model.identity if resident else None
    return TransitionRecord(
        id=core.context.new_id(),
        request_id=admission.request_id,
        kind=admission.kind,
        level=(plan.level if plan else Level.B1).value,
        target=plan.target if plan else "",
        state=TransitionState.PLANNED.value,
        from_identity=plan.from_identity if plan else there,
        to_identity=plan.to_identity if plan else None,
        generation_from=resident.generation if resident else 0,
        created=core.context.clock.now(),
        plan=plan.summary if plan else {},
        undo=plan.undo.value if plan else "NONE",
        verify=plan.verify.value if plan else "",
        target_check=plan.target_check.value if plan else "",
        unread_bytes=plan.unread_bytes if plan else 0,
        readback=core.binding.facts.readback,
    )


def new_transit(core: Core, admission: Admission, chronicle: Chronicle, watch: Stopwatch) -> Transit:
    """The kind of transition that a plan asks for."""
    resident, plan, target, options = core.resident, admission.plan, admission.target, admission.options
    if plan is None or target is None:
        assert resident is not None
        return Unloading(core, chronicle, watch, options, resident=resident, target=None)
    if admission.drifted is not None:
        assert resident is not None
        there = replace(resident, model=admission.drifted)
        return Repair(core, chronicle, watch, options, resident=there, target=target, plan=plan)
    if plan.level is Level.B2:
        assert resident is not None
        return InPlace(core, chronicle, watch, options, resident=resident, target=target, plan=plan)
    return Reload(core, chronicle, watch, options, resident=resident, target=target)
