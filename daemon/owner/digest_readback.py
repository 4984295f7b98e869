"""Reading parents back and digesting them: where images would not fit, or nothing was written."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Final

import numpy as np

from rowlock.bindings.checkpoint.hashing import chunks, hash_groups
from rowlock.bindings.checkpoint.manifest import Manifest, TensorManifest
from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.daemon.owner.core import Core, Steps
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.rows import Drift, group_runs
from rowlock.v1.errors import OwnerError, Reason

BUFFERS: Final = 3
"""Chunks that are hashed while the next is read."""


def read_digests(
    core: Core, resident: Resident, parents: Iterable[str], *, serving: bool = False
) -> Steps[dict[str, TensorManifest]]:
    """Digests of every tensor of some parents, from the bytes that the device returns.

    Args:
        core: the owner's.
        resident: whose parents.
        parents: their names.
        serving: transitions may come between: look before each read.

    Returns:
        By tensor name.

    Raises:
        OwnerError: GENERATION_STALE, when one did.

    """
    layout, memory = resident.model.layout, core.binding.memory
    hashers = core.context.comparers if core.writing else core.context.hashers
    found: dict[str, list[Future[bytes]]] = {}
    buffers = deque(np.empty(0, np.uint8) for _ in range(BUFFERS))
    running: deque[tuple[Bytes, Future[bytes]]] = deque()
    budget = core.step_budget()
    for parent in parents:
        allocation = resident.runtime.allocations[parent]
        for placement in layout.in_parent(parent):
            info = placement.tensor
            found[info.name] = []
            for start, stop in chunks(info, range(info.groups)):
                if len(running) == BUFFERS:
                    buffer, oldest = running.popleft()
                    yield from core.wait(oldest)
                    buffers.append(buffer)
                buffer = buffers.popleft()
                if buffer.nbytes < stop - start:
                    buffer = np.empty(stop - start, np.uint8)
                out = buffer[: stop - start]
                if serving and (core.resident is not resident or core.writing or core.quarantined):
                    raise OwnerError(Reason.GENERATION_STALE, "a transition came while the model was being read")
                memory.read_rows(allocation, placement.first_row + start // info.row_bytes, out)
                job = hashers.submit(hash_groups, out, info.group_rows * info.row_bytes)
                found[info.name].append(job)
                running.append((buffer, job))
                if budget.spend(stop - start):
                    yield None
    for _, job in running:
        yield from core.wait(job)
    return {
        name: TensorManifest(layout.placements[name].tensor, b"".join(part.result() for part in parts))
        for name, parts in found.items()
    }


def drift_of(found: Mapping[str, TensorManifest], manifest: Manifest) -> Drift:
    """The groups in which digests differ from a manifest's."""
    return tuple(
        run
        for name, tensor in found.items()
        for run in group_runs(tensor.info, manifest.tensors[name].differing_groups(tensor))
    )
