"""Repair: a transition from what is really on the device to what should be there.

It is a B2 like any other: the drifted groups are read, proved to be what was found, and
kept as evidence before they are written over. Only its end differs: what was there before
is not an identity, so a repair that fails does not bring it back, it closes the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from rowlock.bindings.plan import UndoStore
from rowlock.daemon.owner.in_place import InPlace


@dataclass(kw_only=True)
class Repair(InPlace):
    """One repair. ``resident`` is the model with the manifest that was read back."""

    @property
    def kept_undo(self) -> UndoStore:
        """Nothing leads back to drifted bytes; a file of them is evidence."""
        return UndoStore.EVIDENCE if self.plan.undo is UndoStore.DURABLE else UndoStore.NONE

    def _publish(self) -> None:
        """What was drift in the touched parents is none from the very moment of the publish."""
        placements = self.resident.model.layout.placements
        self.core.drift = tuple(item for item in self.core.drift if placements[item[0]].parent not in self.parents)
        super()._publish()

    def restore(self, error: Exception) -> None:
        self.unload(self.resident.runtime, error, f"the drifted rows could not be repaired; {self._left_behind()}")
