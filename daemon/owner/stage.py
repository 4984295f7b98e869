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

import numpy as np

from rowlock.bindings.checkpoint.directory import Bytes
from rowlock.bindings.checkpoint.hashing import chunks, hash_groups
from rowlock.bindings.checkpoint.manifest import DIGEST_BYTES, Manifest, TensorManifest
from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.bindings.device import Allocation
from rowlock.bindings.model.layout import Layout, Placement
from rowlock.daemon.owner.images import Images, tensor_bytes, word_of
from rowlock.daemon.owner.record import RowRange
from rowlock.daemon.owner.target import RowSource
from rowlock.v1.errors import OwnerError, Reason


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

        for start, stop in chunks(tensor.info, groups):
            yield self.executor.submit(job, start, stop)

    def disagreements(self, images: Images, layout: Layout, manifest: Manifest) -> list[tuple[str, int, int]]:
        """Rows of the images' parents that are not those of a manifest: (tensor, first row, rows)."""
        found: list[tuple[str, int, int]] = []
        jobs = [
            (
                tensor,
                self.executor.submit(_wrong_groups, tensor, start, tensor_bytes(images, placement)[start:stop]),
            )
            for parent in images
            for placement in layout.in_parent(parent)
            for tensor in (manifest.tensors[placement.tensor.name],)
            for start, stop in chunks(tensor.info, range(tensor.info.groups))
        ]
        for tensor, job in jobs:
            for group in job.result():
                first, stop = tensor.info.group_span(group)
                found.append((tensor.info.name, first, stop - first))
        return found

    def complete(self, before: Images, expected: Images, layout: Layout, changed: Mapping[str, Iterable[int]]) -> None:
        """Fill every row of the expected images that is not in a changed group from the images before."""
        jobs = []
        for parent in expected:
            for placement in layout.in_parent(parent):
                info = placement.tensor
                new, old = tensor_bytes(expected, placement), tensor_bytes(before, placement)
                for groups, keep in _runs(info.groups, changed.get(info.name, ())):
                    if not keep:
                        jobs += [
                            self.executor.submit(np.copyto, new[start:stop], old[start:stop])
                            for start, stop in chunks(info, groups)
                        ]
        _wait(jobs)

    def differing_rows(
        self, before: Images, expected: Images, layout: Layout, changed: Mapping[str, Iterable[int]],
        allocations: Mapping[str, Allocation],
    ) -> list[RowRange]:  # fmt: skip
        """The exact rows that differ, as runs of consecutive rows, in parent order."""
        found: list[RowRange] = []
        for name, groups in changed.items():
            placement = layout.placements[name]
            old, new = tensor_bytes(before, placement), tensor_bytes(expected, placement)
            jobs = [self.executor.submit(_row_runs, placement.tensor, old, new, group) for group in groups]
            runs = _merge(run for job in jobs for run in job.result())
            found += [_row_range(allocations[placement.parent], placement, first, rows) for first, rows in runs]
        return found


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


def _row_runs(info: TensorInfo, old: Bytes, new: Bytes, group: int) -> list[tuple[int, int]]:
    """Runs of rows (first, count) of one group in which bytes differ."""
    first, stop = info.group_span(group)
    span = slice(first * info.row_bytes, stop * info.row_bytes)
    word = word_of(info.row_bytes)
    differs = (old[span].view(word) != new[span].view(word)).reshape(stop - first, -1).any(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], differs, [False])).astype(np.int8)))
    return [(first + int(begin), int(end - begin)) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def _merge(runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join runs that touch, so that neighbours in two groups become one write."""
    current: tuple[int, int] | None = None
    for first, rows in runs:
        if current is not None and current[0] + current[1] == first:
            current = (current[0], current[1] + rows)
            continue
        if current is not None:
            yield current
        current = (first, rows)
    if current is not None:
        yield current


def _row_range(allocation: Allocation, placement: Placement, first: int, rows: int) -> RowRange:
    row, row_bytes = placement.first_row + first, placement.tensor.row_bytes
    return RowRange(placement.parent, allocation.id, row, rows, row * row_bytes, rows * row_bytes)


def _wait(jobs: list[Future[None]]) -> None:
    try:
        for job in jobs:
            job.result()
    finally:
        for job in jobs:
            job.cancel()
