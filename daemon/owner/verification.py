"""Reading the resident model back, whole or in samples, and comparing it with the published identity."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.checkpoint.manifest import Manifest, TensorManifest
from rowlock.daemon.owner.core import Core, Steps
from rowlock.daemon.owner.digest_readback import drift_of, read_digests
from rowlock.daemon.owner.rows import Drift
from rowlock.v1.errors import OwnerError, Reason


@dataclass(frozen=True)
class Sample:
    """Some parents, chosen by a seed: the same seed reads the same parents of the same model."""

    parents: int
    seed: int

    def of(self, names: Iterable[str]) -> list[str]:
        ordered = sorted(names)
        chosen = random.Random(self.seed).sample(ordered, min(self.parents, len(ordered)))
        return [name for name in ordered if name in chosen]


@dataclass(frozen=True)
class Verification:
    """What a verification found.

    Attributes:
        weights: root recomputed from the bytes that the device returned; empty for a sample.
        drift: groups that differ.
        parents: what was read.
        found: digests of every tensor of these, as read back.

    """

    identity: Identity
    generation: int
    weights: str
    bytes_read_back: int
    total_ms: float
    drift: Drift
    parents: tuple[str, ...]
    found: Mapping[str, TensorManifest] = field(repr=False)

    @property
    def ok(self) -> bool:
        return not self.drift and self.weights in {self.identity.weights, ""}


def verify(core: Core, sample: Sample | None = None) -> Steps[Verification]:
    """Read every parent, or a sample of them, in slices; requests go on meanwhile.

    Raises:
        OwnerError: EMPTY, or GENERATION_STALE when a transition came between.
        DeviceError: the device did not answer.

    """
    start = core.context.clock.monotonic()
    resident = core.resident
    if resident is None:
        raise OwnerError(Reason.EMPTY, core.reason or "nothing is resident")
    layout = resident.model.layout
    parents = sample.of(layout.parents) if sample else list(layout.parents)
    found = yield from read_digests(core, resident, parents, serving=True)
    return Verification(
        identity=resident.model.identity,
        generation=resident.generation,
        weights="" if sample else Manifest.of(found.values()).root,
        bytes_read_back=sum(layout.parents[name].nbytes for name in parents),
        total_ms=round((core.context.clock.monotonic() - start) * 1000, 3),
        drift=drift_of(found, resident.model.manifest),
        parents=tuple(parents),
        found=found,
    )
