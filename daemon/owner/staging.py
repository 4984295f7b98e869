"""What a transition asks of whoever stages for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, Self

from rowlock.bindings.checkpoint.manifest import Manifest, TensorManifest
from rowlock.bindings.model.layout import Layout, Placement
from rowlock.bindings.plan import Model
from rowlock.daemon.owner.images import Images
from rowlock.daemon.owner.sources import RowSource


@dataclass(frozen=True)
class Part:
    """One tensor of a parent, as it is and as it shall be.

    Attributes:
        placement: where it lies in the parent.
        old: its manifest now.
        new: its manifest then.
        changed: groups that differ.

    """

    placement: Placement
    old: TensorManifest
    new: TensorManifest
    changed: Sequence[int]


def parts_of(parent: str, resident: Model, target: Model, changed: Mapping[str, Sequence[int]]) -> list[Part]:
    """All tensors of a parent; ``changed`` is by tensor."""
    return [
        Part(placement, resident.manifest.tensors[name], target.manifest.tensors[name], changed.get(name, ()))
        for placement in resident.layout.in_parent(parent)
        for name in (placement.tensor.name,)
    ]


@dataclass(frozen=True)
class Settled:
    """What settling a parent, or a piece of one, found.

    Attributes:
        drift: groups (tensor, first row, rows) that are not the resident manifest's.
        runs: (tensor, first row, rows) of rows that differ.
        nonfinite: values that are not finite where they were before.

    """

    drift: tuple[tuple[str, int, int], ...] = ()
    runs: tuple[tuple[str, int, int], ...] = ()
    nonfinite: int = 0

    @classmethod
    def together(cls, found: Iterable[Settled]) -> Self:
        pieces = list(found)
        return cls(
            drift=tuple(item for piece in pieces for item in piece.drift),
            runs=tuple(item for piece in pieces for item in piece.runs),
            nonfinite=sum(piece.nonfinite for piece in pieces),
        )


class Staging(Protocol):
    """Fills and proves images beside the owner thread, for one transition.

    Everything but ``settle`` blocks, and is not for the owner thread.
    """

    def new_images(self, layout: Layout, parents: Iterable[str], *, sparse: bool = False) -> Images:
        """Buffers for whole parents, content undefined.

        Args:
            layout: of the model.
            parents: by name.
            sparse: only parts will be touched, and shall cost memory.

        """
        ...

    def stage(
        self, source: RowSource, manifest: Manifest, layout: Layout, images: Images,
        wanted: Mapping[str, Iterable[int]], *, whole: bool,
    ) -> None:  # fmt: skip
        """Read groups from a source into images, and check each digest on the way.

        Args:
            source: the target's bytes.
            manifest: of the target.
            layout: where its tensors lie.
            images: of the parents that hold wanted groups.
            wanted: groups to keep, by tensor.
            whole: read and check every other group too, then forget it.

        Raises:
            OwnerError: TARGET_CHANGED, naming tensor and rows, when bytes and manifest disagree; STAGING_FAILED.
            CheckpointError: unreadable.

        """
        ...

    def settle(self, before: Images, expected: Images, parts: Sequence[Part], *, sparse: bool) -> list[Future[Settled]]:
        """Prove the image of a parent as it is, and complete and prove the one expected.

        Changed groups: the bytes before are proved against the resident manifest, and
        compared row by row with those staged. All others: copied from before to expected,
        and proved there against the target's manifest, which says the same of them.

        Args:
            before: what the device returned; complete.
            expected: holds the staged groups; the rest is filled here.
            parts: the tensors of the parent.
            sparse: only changed groups are in the images, and settled.

        """
        ...

    def nonfinite(self, images: Images, layout: Layout) -> int:
        """How many values of whole parents are infinite or NaN."""
        ...

    def at_hand(self, images: Images) -> None:
        """Have the memory of images ready for this process: nobody who uses them has to wait for a page."""
        ...

    def close(self) -> None:
        """Nothing is staged any more. Images stay as they are; those that are dropped before cost nobody time."""
        ...
