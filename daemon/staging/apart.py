"""Staging and digesting in a process of its own, where somebody decodes; else on threads of this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Final

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.hashing import Hasher, Progress, chunks, no_progress
from rowlock.bindings.checkpoint.manifest import Manifest
from rowlock.bindings.checkpoint.tensor_files import TensorFiles
from rowlock.bindings.model.layout import Layout
from rowlock.daemon.owner.images import Images, image_sizes, tensor_bytes
from rowlock.daemon.owner.sources import Groups, OverlaySource, RowSource
from rowlock.daemon.owner.stage import PIECE_BYTES, Stager, await_all, runs_of
from rowlock.daemon.owner.staging import Part, Settled, Staging
from rowlock.daemon.pacing import PacedExecutor
from rowlock.daemon.staging.orders import CountNonfinite, Digest, FileList, Reserve, Settle, Share, Stage
from rowlock.daemon.staging.process import StagingProcess
from rowlock.daemon.staging.shared import SharedImages, look_at_every_page, new_memory

APART_BYTES: Final = 16 * 1024 * 1024
"""Less is read and proved by threads in a few steps of decoding; a process needs twenty to start."""


class ApartStager:
    """Stages in another process. See :class:`rowlock.daemon.owner.staging.Staging`.

    Args:
        process: does it; closed with this.
        executor: runs here the little that cannot be done there.

    """

    def __init__(self, process: StagingProcess, executor: Executor) -> None:
        self._process = process
        self._executor = executor
        self._made = 0

    def new_images(self, layout: Layout, parents: Iterable[str], *, sparse: bool = False) -> SharedImages:
        """They are always sparse: ``at_hand`` takes their memory."""
        self._made += 1
        sizes = image_sizes(layout, parents)
        descriptor = new_memory(sizes)
        try:
            self._process.submit(Share(self._made, sizes), [descriptor]).result()
            return SharedImages.attach(self._made, descriptor, sizes)
        finally:
            os.close(descriptor)

    def stage(
        self, source: RowSource, manifest: Manifest, layout: Layout, images: Images,
        wanted: Mapping[str, Iterable[int]], *, whole: bool,
    ) -> None:  # fmt: skip
        groups = {name: tuple(indices) for name, indices in wanted.items()}
        files, overlay = _files_of(source)
        if files is None:
            assert not (whole and manifest.tensors), "what is kept as groups is never a whole target"
            self._place(source, manifest, layout, images, groups)
        listed, descriptors = FileList.of(files) if files is not None else (None, [])
        kept = {key: bytes(data) for key, data in overlay.items()}
        order = Stage(listed, kept, manifest, layout, _number(images), groups, whole)
        self._process.submit(order, descriptors).result()

    def _place(
        self, source: RowSource, manifest: Manifest, layout: Layout, images: Images,
        wanted: Mapping[str, Sequence[int]],
    ) -> None:  # fmt: skip
        """Copy kept groups into images; they are checked there."""
        jobs = []
        for name, kept in wanted.items():
            info, out = manifest.tensors[name].info, tensor_bytes(images, layout.placements[name])
            spans = [groups for groups, keep in runs_of(info.groups, kept) if keep]
            for start, stop in (span for groups in spans for span in chunks(info, groups, PIECE_BYTES)):
                jobs.append(self._executor.submit(source.read_into, name, start, out[start:stop]))
        await_all(jobs)

    def settle(self, before: Images, expected: Images, parts: Sequence[Part], *, sparse: bool) -> list[Future[Settled]]:
        return [self._process.submit(Settle(_number(before), _number(expected), parts, sparse))]

    def nonfinite(self, images: Images, layout: Layout) -> int:
        found: int = self._process.submit(CountNonfinite(_number(images), layout)).result()
        return found

    def at_hand(self, images: Images) -> None:
        assert isinstance(images, SharedImages)
        self._process.submit(Reserve(images.number)).result()
        await_all([self._executor.submit(look_at_every_page, piece) for piece in images.pieces()])

    def close(self) -> None:
        self._process.close()


@dataclass(frozen=True)
class Stagers:
    """Decides where to stage.

    Attributes:
        executor: runs what is done here.
        threads: of a process of its own.
        log: takes an event name and fields.

    """

    executor: PacedExecutor
    threads: int
    log: Callable[..., None]

    def new(self, nbytes: int) -> Staging:
        """For one transition that has so many bytes to read and prove."""
        process = self.process(nbytes)
        return Stager(self.executor) if process is None else ApartStager(process, self.executor)

    def process(self, nbytes: int) -> StagingProcess | None:
        """A new one, where it pays: somebody decodes, and there is more to do than a process takes to start."""
        if nbytes < APART_BYTES or not self.executor.decoding_goes_on():
            return None
        try:
            return StagingProcess(self.threads)
        except OSError as error:
            self.log("staging.not_apart", error=str(error))
            return None


class ApartHasher(Hasher):
    """Digests checkpoints where staging would be done.

    Args:
        stagers: decide.

    """

    def __init__(self, stagers: Stagers) -> None:
        super().__init__(stagers.executor)
        self._stagers = stagers

    def tensor_digests(self, files: TensorFiles, progress: Progress = no_progress) -> dict[str, bytes]:
        process = self._stagers.process(sum(info.nbytes for info in files.tensors.values()))
        if process is None:
            return super().tensor_digests(files, progress)
        listed, descriptors = FileList.of(files)
        try:
            found: dict[str, bytes] = process.submit(Digest(listed), descriptors, progress).result()
        finally:
            process.close()
        return found


def _files_of(source: RowSource) -> tuple[TensorFiles | None, Groups]:
    """The files that a source reads, if it does, and the groups that lie over them."""
    match source:
        case Checkpoint():
            return source.files, {}
        case OverlaySource(under=Checkpoint() as under):
            return under.files, source.groups
        case _:
            return None, {}


def _number(images: Images) -> int:
    assert isinstance(images, SharedImages)
    return images.number
