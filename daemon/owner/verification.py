"""Reading the whole resident model back, and comparing it with the published identity."""

from __future__ import annotations

from dataclasses import dataclass

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.checkpoint.manifest import Manifest
from rowlock.daemon.owner.core import Core, Steps
from rowlock.daemon.owner.digest_readback import Drift, drift_of, read_digests
from rowlock.v1.errors import OwnerError, Reason


@dataclass(frozen=True)
class Verification:
    """What a verification found.

    Attributes:
        weights: root recomputed from the bytes that the device returned.
        drift: groups that differ.

    """

    identity: Identity
    generation: int
    weights: str
    bytes_read_back: int
    total_ms: float
    drift: Drift

    @property
    def ok(self) -> bool:
        return not self.drift and self.weights == self.identity.weights


def verify(core: Core) -> Steps[Verification]:
    """Read every parent, in slices; requests go on meanwhile.

    Raises:
        OwnerError: EMPTY, or GENERATION_STALE when a transition came between.
        DeviceError: the device did not answer.

    """
    start = core.context.clock.monotonic()
    resident = core.resident
    if resident is None:
        raise OwnerError(Reason.EMPTY, core.reason or "nothing is resident")
    found = yield from read_digests(core, resident, resident.model.layout.parents, serving=True)
    return Verification(
        identity=resident.model.identity,
        generation=resident.generation,
        weights=Manifest.of(found.values()).root,
        bytes_read_back=resident.model.layout.nbytes,
        total_ms=round((core.context.clock.monotonic() - start) * 1000, 3),
        drift=drift_of(found, resident.model.manifest),
    )
