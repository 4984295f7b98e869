"""The decoder over copies of what the device holds.

No graph can be executed here without the vendor's compiler, so the programs run on the host, on
copies that are read back from the device, and read again after every write. The device's
bytes decide what is computed; how the device would compute is not shown.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rowlock.bindings.device import Allocation, Sequence, Step
from rowlock.bindings.host_arena import HostArena
from rowlock.bindings.memory import RowMemory
from rowlock.bindings.model.runtime import DecoderRuntime
from rowlock.bindings.weights import host_rows


class HostCopies:
    """One host tensor per allocation, as current as the last ``refresh``."""

    def __init__(self, memory: RowMemory, allocations: Mapping[str, Allocation]) -> None:
        self._memory = memory
        self._allocations = allocations
        arena = HostArena()
        self._bytes = {name: arena.take(item.parent) for name, item in allocations.items()}
        self._writes_seen: dict[str, int] = {}

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {name: host_rows(item.parent, self._bytes[name]) for name, item in self._allocations.items()}

    def refresh(self) -> None:
        """Read again whatever was written since. Raises DeviceError; then it stays to be read."""
        for name, allocation in self._allocations.items():
            writes = self._memory.writes(allocation)
            if self._writes_seen.get(name) != writes:
                self._memory.read_rows(allocation, 0, self._bytes[name])
                self._writes_seen[name] = writes


class HostReferenceRuntime(DecoderRuntime):
    """See :class:`rowlock.bindings.device.Runtime`."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        self._copies = HostCopies(self._memory, self.allocations)
        return self._copies.tensors

    def advance(self, sequences: list[Sequence]) -> list[Step]:
        self._copies.refresh()
        return super().advance(sequences)
