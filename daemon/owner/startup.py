"""What a starting owner does: recover, and on a first start load the checkpoint that was given."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rowlock.bindings.plan import Require
from rowlock.daemon.owner.admission import Admission
from rowlock.daemon.owner.core import Core, Steps
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.planning import Planner
from rowlock.daemon.owner.recovery import recover
from rowlock.daemon.owner.transitions import Transitions
from rowlock.v1.errors import OwnerError


@dataclass(frozen=True)
class Startup:
    """What a starting owner does.

    Attributes:
        initial: checkpoint of a first start.
        reload: load what was published last; else start EMPTY.
        options: of the first load.

    """

    initial: Path | None = None
    reload: bool = True
    options: Options = field(default_factory=Options)


def start_up(core: Core, planner: Planner, transitions: Transitions, startup: Startup) -> Steps[None]:
    """Bring back what was published last; where nothing ever was, load the first checkpoint.

    Raises:
        Exception: why the first checkpoint could not be loaded; a failed close of what was begun is its ``__cause__``,
            and the owner is QUARANTINED then. Else it is EMPTY, and ``core.reason`` says why.

    """
    yield from recover(core, reload=startup.reload)
    if core.resident is not None or core.quarantined or not startup.reload:
        return
    yield from _offer_another(core, planner)
    if startup.initial is not None and core.journal.current() is None:
        yield from _load_first(core, planner, transitions, startup.initial, startup.options)


def _offer_another(core: Core, planner: Planner) -> Steps[None]:
    """The last published identity could not be loaded: say which earlier one could."""
    generation = yield from core.on_worker(planner.loadable)
    if generation:
        core.reason += f"; generation {generation} can be loaded: rowlock rollback --to {generation}"


def _load_first(core: Core, planner: Planner, transitions: Transitions, initial: Path, options: Options) -> Steps[None]:
    try:
        plan, target = yield from core.on_worker(planner.transition, None, initial, Require.AUTO, options)
    except OwnerError as error:
        core.reason = f"the first checkpoint could not be loaded: {error}"
        raise
    failure = yield from transitions.within(Admission("load", plan, target, options))
    if core.resident is None:
        core.reason = core.reason or f"the first checkpoint could not be loaded: {failure}"
        raise failure or core.absent_error()
