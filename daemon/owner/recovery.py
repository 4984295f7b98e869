"""Starting: what the journal says was going on, and what is resident from now on.

The journal says intent, the device says fact, and the fact wins. The memory of this kind
of device dies with the process that owned it, so nothing is resident at start: the last
published identity is loaded again, and proved. Nothing is ever rolled forward.
"""

from __future__ import annotations

from pathlib import Path

from rowlock.daemon.owner.chronicle import Chronicle
from rowlock.daemon.owner.core import Core, Steps
from rowlock.daemon.owner.outcome import EXPECTED_ERRORS, conclude
from rowlock.daemon.owner.planning import identity_of
from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.owner.reload import install
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.states import TransitionEvent, TransitionState
from rowlock.daemon.owner.target import Target
from rowlock.daemon.owner.text import Text
from rowlock.journal.journal import GenerationRow
from rowlock.v1.errors import OwnerError, Reason


def recover(core: Core) -> Steps[None]:
    """Load the last published identity, then end whatever transition was open."""
    current = core.journal.current()
    if current is not None:
        try:
            core.resident = yield from _load_generation(core, current)
        except EXPECTED_ERRORS as error:
            core.reason = f"generation {current.generation} could not be loaded again: {error}"
    for row in core.journal.open_transitions():
        record = TransitionRecord.from_json(row.record)
        chronicle = Chronicle.resumed(core.journal, core.context.clock, record, core.notify)
        _end_interrupted(core, chronicle)
    core.changed()


def _end_interrupted(core: Core, chronicle: Chronicle) -> None:
    cause = OwnerError(Reason.INTERRUPTED, "the daemon stopped before this transition ended")
    if chronicle.state in {TransitionState.PLANNED, TransitionState.STAGED}:
        conclude(core, chronicle, TransitionEvent.FAILED, "nothing was written", cause)
    elif core.resident is not None:
        outcome = "device memory died with the process; the old identity is loaded again, and proved"
        conclude(core, chronicle, TransitionEvent.OLD_PROVED, outcome, cause)
    else:
        conclude(core, chronicle, TransitionEvent.RUNTIME_CLOSED, core.reason or "nothing is resident", cause)


def _load_generation(core: Core, row: GenerationRow) -> Steps[Resident]:
    target = yield from core.on_worker(_open_generation, core, row)
    try:
        runtime = install(core, target)
    finally:
        target.close()
    return Resident(row.generation, target.model, target.config, target.text, runtime)


def _open_generation(core: Core, row: GenerationRow) -> Target:
    """The checkpoint of a generation; its assets come from the state directory if they changed since."""
    target = core.loader.open(Path(row.checkpoint))
    wanted, found = identity_of(row), target.model.identity
    if (found.program, found.weights) != (wanted.program, wanted.weights):
        target.close()
        raise OwnerError(Reason.TARGET_CHANGED, f"{row.checkpoint}: does not hold generation {row.generation} any more")
    if found == wanted:
        return target
    text = Text(core.stores.assets / row.assets, core.stores.kept_assets(row.assets))
    return target.as_identity(wanted, text)
