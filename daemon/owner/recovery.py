"""Starting: what the journal says was going on, and what is resident from now on.

The journal says intent, the device says fact, and the fact wins. The memory of this kind
of device dies with the process that owned it, so nothing is resident at start: the last
published identity is loaded again, and proved. Nothing is ever rolled forward.
"""

from __future__ import annotations

from pathlib import Path

from rowlock.daemon.owner.chronicle import Chronicle
from rowlock.daemon.owner.core import CancelledError, Core, Steps
from rowlock.daemon.owner.install import install
from rowlock.daemon.owner.outcome import conclude, is_expected, sweep
from rowlock.daemon.owner.planning import identity_of
from rowlock.daemon.owner.rebuild import rebuild
from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.states import TransitionEvent, TransitionState
from rowlock.journal.journal_file import JournalError
from rowlock.journal.rows import GenerationRow
from rowlock.v1.errors import OwnerError, Reason


def recover(core: Core, *, reload: bool) -> Steps[None]:
    """Load the last published identity, then end whatever transition was open.

    Args:
        core: the owner's.
        reload: load at all; else the owner starts EMPTY.

    """
    core.quarantined = core.journal.quarantine()
    if core.quarantined:
        core.reason = "the device was quarantined by an earlier process"
    elif reload:
        yield from _load_last(core)
    else:
        core.reason = "on_start = empty"
    for row in core.journal.open_transitions():
        record = TransitionRecord.from_json(row.record)
        _end_interrupted(core, Chronicle.resumed(core.journal, core.context.clock, record, core.notify))
    try:
        yield from core.on_worker(sweep, core)
    except (JournalError, OSError) as error:
        core.context.log("sweep.failed", error=str(error))
    core.changed()


def _load_last(core: Core) -> Steps[None]:
    current = core.journal.current()
    if current is None:
        return
    try:
        core.resident = yield from _load_generation(core, current)
    except CancelledError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, the owner comes up EMPTY and says why
        if not is_expected(error):
            core.context.log("recovery.bug", exc_info=error)
        core.reason = f"generation {current.generation} could not be loaded again: {error}"


def _end_interrupted(core: Core, chronicle: Chronicle) -> None:
    cause = OwnerError(Reason.INTERRUPTED, "the daemon stopped before this transition ended")
    if chronicle.state in {TransitionState.PLANNED, TransitionState.STAGED}:
        conclude(core, chronicle, TransitionEvent.FAILED, "nothing was written", cause)
    elif core.quarantined:
        conclude(core, chronicle, TransitionEvent.CLOSE_FAILED, core.quarantined, cause)
    elif core.resident is not None:
        outcome = "device memory died with the process; the old identity is loaded again, and proved"
        conclude(core, chronicle, TransitionEvent.OLD_PROVED, outcome, cause)
    else:
        conclude(core, chronicle, TransitionEvent.RUNTIME_CLOSED, core.reason or "nothing is resident", cause)


def _load_generation(core: Core, row: GenerationRow) -> Steps[Resident]:
    checkpoint = Path(row.checkpoint)
    target = yield from core.on_worker(
        rebuild, core.stores, core.loader, identity_of(row), checkpoint, row.overlay, row.generation
    )
    try:
        runtime = install(core, target, core.is_stopping)
    finally:
        target.close()
    return Resident.of(row.generation, target, runtime)
