"""Staging: proving what shall be written, and narrowing it to exact rows, on worker threads.

Left of the drain, for each touched parent::

    source ──changed groups──> expected <──all other rows── before <──D2H── device
              (digest checked)     │                          │ (digest checked)
                                   └── compared row by row ───┘──> exact rows to write
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

import numpy as np

from rowlock.bindings.checkpoint.hashing import chunks, hash_groups
from rowlock.bindings.checkpoint.manifest import DIGEST_BYTES, Manifest, TensorManifest
from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.model.layout import Layout
from rowlock.bindings.plan import Model
from rowlock.daemon.owner.images import Images, tensor_bytes
from rowlock.daemon.owner.rows import count_nonfinite, group_runs, new_nonfinite, row_runs
from rowlock.daemon.owner.target import RowSource
from rowlock.v1.errors import OwnerError, Reason

PIECE_BYTES: Final = 1024 * 1024
"""Bytes of one job: a millisecond or two, since beside decoding a step bears only so much of them."""

TOUCH_BYTES: Final = 1024
"""Less than a page, since numpy keeps the interpreter's lock for assignments of a few hundred values."""


@dataclass(frozen=True)
class Stager:
    """Fills and proves images on worker threads.

    Attributes:
        executor: runs the pieces.

    """

    executor: Executor

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
            OwnerError: TARGET_CHANGED, naming tensor and rows, when bytes and manifest disagree.
            CheckpointError: unreadable.

        """
        jobs: list[Future[None]] = []
        for name, tensor in manifest.tensors.items():
            kept = wanted.get(name, ())
            for groups, keep in _runs(tensor.info.groups, kept):
                if keep or whole:
                    out = tensor_bytes(images, layout.placements[name]) if keep else None
                    jobs += self._stage_run(source, tensor, groups, out)
        _wait(jobs)

    def _stage_run(
        self, source: RowSource, tensor: TensorManifest, groups: range, out: Bytes | None
    ) -> Iterator[Future[None]]:
        def job(start: int, stop: int) -> None:
            buffer = np.empty(stop - start, np.uint8) if out is None else out[start:stop]
            source.read_into(tensor.info.name, start, buffer)
            wrong = _wrong_groups(tensor, start, buffer)
            if wrong:
                first, last = tensor.info.group_span(wrong[0])
                raise OwnerError(
                    Reason.TARGET_CHANGED,
                    f"{tensor.info.name}: rows {first} to {last - 1} are not those of the target's manifest",
                )

        for start, stop in chunks(tensor.info, groups, PIECE_BYTES):
            yield self.executor.submit(job, start, stop)

    def touch(self, images: Images) -> None:
        """Have the memory of images at hand: a system can take milliseconds for a page, and no step shall wait."""
        jobs = [
            self.executor.submit(_touch, image[start : start + PIECE_BYTES])
            for image in images.values()
            for start in range(0, image.nbytes, PIECE_BYTES)
        ]
        _wait(jobs)

    def nonfinite(self, images: Images, layout: Layout) -> int:
        """How many values of whole parents are infinite or NaN."""
        jobs = [
            self.executor.submit(count_nonfinite, placement.tensor.dtype, tensor_bytes(images, placement)[start:stop])
            for placement in layout.placements.values()
            for start, stop in chunks(placement.tensor, range(placement.tensor.groups), PIECE_BYTES)
        ]
        return sum(job.result() for job in jobs)

    def settle(
        self, parent: str, before: Images, expected: Images, resident: Model, target: Model,
        changed: Mapping[str, Iterable[int]], *, sparse: bool,
    ) -> list[Future[Settled]]:  # fmt: skip
        """Prove the image of a parent as it is, and complete and prove the one expected.

        Changed groups: the bytes before are proved against the resident manifest, and
        compared row by row with those staged. All others: copied from before to expected,
        and proved there against the target's manifest, which says the same of them.

        Args:
            parent: its name; ``before`` is complete.
            before: what the device returned.
            expected: holds the staged groups; the rest is filled here.
            resident: manifest and layout of what is on the device.
            target: manifest of what shall be.
            changed: groups that differ, by tensor.
            sparse: only changed groups are in the images, and settled.

        """
        jobs = []
        for placement in resident.layout.in_parent(parent):
            name = placement.tensor.name
            old, new = resident.manifest.tensors[name], target.manifest.tensors[name]
            images = tensor_bytes(before, placement), tensor_bytes(expected, placement)
            for groups, differs in _runs(placement.tensor.groups, changed.get(name, ())):
                if differs or not sparse:
                    job = _settle_changed if differs else _settle_same
                    for start, stop in chunks(placement.tensor, groups, PIECE_BYTES):
                        spans = images[0][start:stop], images[1][start:stop]
                        jobs.append(self.executor.submit(job, old, new, start, spans[0], spans[1]))
        return jobs


@dataclass(frozen=True)
class Settled:
    """What settling a piece of a parent found.

    Attributes:
        drift: groups (tensor, first row, rows) that are not the resident manifest's.
        runs: (tensor, first row, rows) of rows that differ.
        nonfinite: values that are not finite where they were before.

    """

    drift: tuple[tuple[str, int, int], ...] = ()
    runs: tuple[tuple[str, int, int], ...] = ()
    nonfinite: int = 0


def _touch(piece: Bytes) -> None:
    piece[::TOUCH_BYTES] = 0


def _settle_changed(old: TensorManifest, _new: TensorManifest, start: int, before: Bytes, expected: Bytes) -> Settled:
    name = old.info.name
    return Settled(
        drift=tuple(group_runs(old.info, _wrong_groups(old, start, before))),
        runs=tuple((name, first, rows) for first, rows in row_runs(old.info, start, before, expected)),
        nonfinite=new_nonfinite(old.info.dtype, before, expected),
    )


def _settle_same(_old: TensorManifest, new: TensorManifest, start: int, before: Bytes, expected: Bytes) -> Settled:
    np.copyto(expected, before)
    return Settled(drift=tuple(group_runs(new.info, _wrong_groups(new, start, expected))))


def _runs(groups: int, kept: Iterable[int]) -> Iterator[tuple[range, bool]]:
    """Consecutive groups that are all kept, or all not."""
    flags = np.zeros(groups + 2, np.int8)
    flags[1 + np.fromiter(kept, np.intp)] = 1
    flags[0] = flags[-1] = -1
    edges = np.flatnonzero(np.diff(flags[: groups + 1]))
    edges = np.append(edges, groups)
    for first, stop in itertools.pairwise(edges):
        yield range(int(first), int(stop)), bool(flags[first + 1])


def _wrong_groups(tensor: TensorManifest, start: int, data: Bytes) -> list[int]:
    """Groups of ``data`` (from byte ``start`` of the tensor on) whose digests are not the manifest's."""
    group_bytes = tensor.info.group_rows * tensor.info.row_bytes
    first = start // group_bytes
    found = hash_groups(data, group_bytes)
    count = len(found) // DIGEST_BYTES
    if found == tensor.digests[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]:
        return []
    return [
        first + index
        for index in range(count)
        if found[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] != tensor.group(first + index)
    ]


def _wait(jobs: list[Future[None]]) -> None:
    try:
        for job in jobs:
            job.result()
    finally:
        for job in jobs:
            job.cancel()
