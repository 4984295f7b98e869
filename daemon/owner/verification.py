"""Reading the whole resident model back, and comparing it with the published identity."""

from __future__ import annotations

from dataclasses import dataclass

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.checkpoint.manifest import Manifest, TensorManifest
from rowlock.daemon.owner.core import Core, Steps
from rowlock.daemon.owner.images import Images, new_images, read_slices, tensor_bytes
from rowlock.daemon.owner.resident import Resident
from rowlock.v1.errors import OwnerError, Reason


@dataclass(frozen=True)
class Verification:
    """What a verification found.

    Attributes:
        weights: root recomputed from the bytes that the device returned.
        drift: (tensor, first row, rows) of each group that differs.

    """

    identity: Identity
    generation: int
    weights: str
    bytes_read_back: int
    total_ms: float
    drift: tuple[tuple[str, int, int], ...]

    @property
    def ok(self) -> bool:
        return not self.drift and self.weights == self.identity.weights


def verify(core: Core) -> Steps[Verification]:
    """Read every parent, one at a time and in slices; requests go on meanwhile.

    Raises:
        OwnerError: EMPTY, or GENERATION_STALE when a transition came between.
        DeviceError: the device did not answer.

    """
    start = core.context.clock.monotonic()
    resident = core.resident
    if resident is None:
        raise OwnerError(Reason.EMPTY, core.reason or "nothing is resident")
    tensors: list[TensorManifest] = []
    drift: list[tuple[str, int, int]] = []
    for parent in resident.model.layout.parents:
        image = new_images(resident.model.layout, [parent])
        for _ in read_slices(core.binding.memory, resident.runtime.allocations, image):
            yield None
            if core.resident is not resident:
                raise OwnerError(Reason.GENERATION_STALE, "a transition ended while the model was being read")
        found, wrong = yield from core.on_worker(_digest_parent, core, resident, parent, image)
        tensors += found
        drift += wrong
    return Verification(
        identity=resident.model.identity,
        generation=resident.generation,
        weights=Manifest.of(tensors).root,
        bytes_read_back=resident.model.layout.nbytes,
        total_ms=round((core.context.clock.monotonic() - start) * 1000, 3),
        drift=tuple(drift),
    )


def _digest_parent(
    core: Core, resident: Resident, parent: str, image: Images
) -> tuple[list[TensorManifest], list[tuple[str, int, int]]]:
    """Manifests of a parent's tensors as they were read, and the rows that are not as published."""
    tensors, drift = [], []
    for placement in resident.model.layout.in_parent(parent):
        info = placement.tensor
        found = TensorManifest(info, core.loader.hasher.digests(info, tensor_bytes(image, placement)))
        tensors.append(found)
        for group in resident.model.manifest.tensors[info.name].differing_groups(found):
            first, stop = info.group_span(group)
            drift.append((info.name, first, stop - first))
    return tensors, drift
