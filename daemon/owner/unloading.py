"""Unload: close the runtime on request. It is a transition without a target."""

from __future__ import annotations

from dataclasses import dataclass

from rowlock.daemon.owner.core import Steps
from rowlock.daemon.owner.outcome import conclude
from rowlock.daemon.owner.record import RowRange
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.states import TransitionEvent
from rowlock.daemon.owner.transit import Transit
from rowlock.v1.errors import OwnerError, Reason


@dataclass(kw_only=True)
class Unloading(Transit):
    """One unload; its outcome is UNLOADED."""

    resident: Resident

    def prepare(self) -> Steps[None]:
        yield from self.core.on_worker(self.chronicle.stage, "nothing to stage")

    def intent(self) -> tuple[str, list[RowRange]]:
        return "the runtime is to be closed", []

    def exclude(self) -> None:
        core = self.core
        core.binding.memory.fence()
        core.resident, core.reason = None, "unloaded on request"
        core.changed()
        with self.watch.phase("close"):
            core.close_runtime(self.resident.runtime)
        request = OwnerError(Reason.EMPTY, "unloaded on request")
        conclude(core, self.chronicle, TransitionEvent.RUNTIME_CLOSED, "nothing is resident", request)

    def restore(self, error: Exception) -> None:
        self.unload(self.resident.runtime, error, "the model was to be unloaded anyway")
