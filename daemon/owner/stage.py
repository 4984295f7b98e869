"""Staging: proving what shall be written, and narrowing it to exact rows, on worker threads.

Left of the drain, for each touched parent::

    source ──changed groups──> expected <──all other rows── before <──D2H── device
              (digest checked)     │                          │ (digest checked)
                                   └── compared row by row ───┘──> exact rows to write
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

import numpy as np

from rowlock.bindings.checkpoint.hashing import chunks, hash_groups
from rowlock.bindings.checkpoint.manifest import DIGEST_BYTES, Manifest, TensorManifest
from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.model.layout import Layout
from rowlock.daemon.owner.images import Images, new_images, tensor_bytes
from rowlock.daemon.owner.rows import count_nonfinite, group_runs, new_nonfinite, row_runs
from rowlock.daemon.owner.sources import RowSource
from rowlock.daemon.owner.staging import Part, Settled
from rowlock.v1.errors import OwnerError, Reason

PIECE_BYTES: Final = 1024 * 1024
"""Bytes of one job: a millisecond or two, since beside decoding a step bears only so much of them."""


@dataclass(frozen=True)
class Stager:
    """Stages on threads of this process. See :class:`rowlock.daemon.owner.staging.Staging`.

    Attributes:
        executor: runs the pieces.

    """

    executor: Executor

    def new_images(self, layout: Layout, parents: Iterable[str], *, sparse: bool = False) -> Images:
        return new_images(layout, parents, sparse=sparse)

    def stage(
        self, source: RowSource, manifest: Manifest, layout: Layout, images: Images,
        wanted: Mapping[str, Iterable[int]], *, whole: bool,
    ) -> None:  # fmt: skip
        jobs: list[Future[None]] = []
        for name, tensor in manifest.tensors.items():
            for groups, keep in runs_of(tensor.info.groups, wanted.get(name, ())):
                if keep or whole:
                    out = tensor_bytes(images, layout.placements[name]) if keep else None
                    jobs += self._stage_run(source, tensor, groups, out)
        await_all(jobs)

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

    def nonfinite(self, images: Images, layout: Layout) -> int:
        """How many values of whole parents are infinite or NaN."""
        jobs = [
            self.executor.submit(count_nonfinite, placement.tensor.dtype, tensor_bytes(images, placement)[start:stop])
            for placement in layout.placements.values()
            for start, stop in chunks(placement.tensor, range(placement.tensor.groups), PIECE_BYTES)
        ]
        return sum(job.result() for job in jobs)

    def settle(self, before: Images, expected: Images, parts: Sequence[Part], *, sparse: bool) -> list[Future[Settled]]:
        jobs = []
        for part in parts:
            tensor = part.placement.tensor
            images = tensor_bytes(before, part.placement), tensor_bytes(expected, part.placement)
            for groups, differs in runs_of(tensor.groups, part.changed):
                if differs or not sparse:
                    job = _settle_changed if differs else _settle_same
                    for start, stop in chunks(tensor, groups, PIECE_BYTES):
                        spans = images[0][start:stop], images[1][start:stop]
                        jobs.append(self.executor.submit(job, part.old, part.new, start, spans[0], spans[1]))
        return jobs

    def at_hand(self, _images: Images) -> None:
        """They are of this process, and come in the largest pages there are."""

    def close(self) -> None:
        """Nothing is open."""


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


def runs_of(groups: int, kept: Iterable[int]) -> Iterator[tuple[range, bool]]:
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


def await_all(jobs: Sequence[Future[None]]) -> None:
    """Wait for jobs; when one fails the rest is called off."""
    try:
        for job in jobs:
            job.result()
    finally:
        for job in jobs:
            job.cancel()
