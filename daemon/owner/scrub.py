"""The scrub: an idle owner reads its model back, slice by slice, for ever.

One slice at a time, and after each a rest, so that reading and digesting take no more than
their share of time. While anything else goes on, it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from rowlock.bindings.checkpoint.hashing import chunks, hash_groups
from rowlock.bindings.checkpoint.manifest import DIGEST_BYTES
from rowlock.bindings.model.layout import Placement
from rowlock.daemon.owner.core import CancelledError, Core, Steps
from rowlock.daemon.owner.drift import DriftKeeper
from rowlock.daemon.owner.resident import Resident

REST_MIN_S: Final = 0.02
IDLE_LOOK_S: Final = 0.25
"""How long a scrub waits before it looks again whether the owner is idle."""


@dataclass(frozen=True)
class Slice:
    """Consecutive groups of one tensor: at most as much as is read in one step. Offsets in bytes of the tensor."""

    placement: Placement
    start: int
    stop: int


@dataclass(frozen=True)
class Scrub:
    """Reads what is resident, over and over.

    Attributes:
        share: of time, above 0 and at most 1.
        idle: whether nothing else is going on.

    """

    core: Core
    keeper: DriftKeeper
    share: float
    idle: Callable[[], bool]

    def run(self) -> Steps[None]:
        """For ever; ends only by being cancelled."""
        while True:
            resident = self.core.resident
            if resident is None or not self.idle():
                yield from self._rest(IDLE_LOOK_S)
                continue
            try:
                yield from self._read_all(resident)
            except CancelledError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, requests go on, and a later pass looks again
                self.core.context.log("scrub.ended_early", error=repr(error))
                yield from self._rest(IDLE_LOOK_S)

    def _read_all(self, resident: Resident) -> Steps[None]:
        """One pass, while this model is resident."""
        core, clock = self.core, self.core.context.clock
        for item in slices(resident):
            while not self.idle():
                yield from self._rest(IDLE_LOOK_S)
            if core.resident is not resident:
                return
            start = clock.monotonic()
            same = yield from self._is_as_published(resident, item)
            if not same:
                yield from self.keeper.confirm(resident, item.placement.parent)
            took = clock.monotonic() - start
            yield from self._rest(max(took * (1 / self.share - 1), REST_MIN_S))
        core.scrubbed = clock.now()
        core.changed()

    def _is_as_published(self, resident: Resident, item: Slice) -> Steps[bool]:
        info, data = item.placement.tensor, np.empty(item.stop - item.start, np.uint8)
        allocation = resident.runtime.allocations[item.placement.parent]
        self.core.binding.memory.read_rows(allocation, item.placement.first_row + item.start // info.row_bytes, data)
        group_bytes = info.group_rows * info.row_bytes
        found = yield from self.core.wait(self.core.context.hashers.submit(hash_groups, data, group_bytes))
        first = item.start // group_bytes * DIGEST_BYTES
        return resident.model.manifest.tensors[info.name].digests[first : first + len(found)] == found

    def _rest(self, seconds: float) -> Steps[None]:
        yield from self.core.wait(self.core.context.clock.after(seconds))


def slices(resident: Resident) -> Iterator[Slice]:
    """The whole model in slices, parent by parent."""
    layout = resident.model.layout
    for parent in layout.parents:
        for placement in layout.in_parent(parent):
            for start, stop in chunks(placement.tensor, range(placement.tensor.groups)):
                yield Slice(placement, start, stop)
