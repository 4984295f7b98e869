"""Staging and digesting in a process of its own, where somebody decodes; else on threads of this one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
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
from rowlock.daemon.staging.orders import CountNonfinite, Digest, FileList, Forget, Reserve, Settle, Share, Stage
from rowlock.daemon.staging.process import StagingProcess
from rowlock.daemon.staging.shared import SharedImages, look_at_every_page, new_memory

APART_BYTES: Final = 16 * 1024 * 1024
"""Less is read and proved by threads in a few steps of decoding; a process needs twenty to start."""


class ApartStager:
    """Stages in another process. See :class:`rowlock.daemon.owner.staging.Staging`.

    Args:
        process: does it.
        executor: runs here the little that cannot be done there.
        give_back: takes the process when this is closed.

    """

    def __init__(
        self, process: StagingProcess, executor: Executor, give_back: Callable[[StagingProcess], None]
    ) -> None:
        self._process = process
        self._executor = executor
        self._give_back = give_back
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
        self._give_back(self._process)


class Stagers:
    """Decides where to stage, and keeps a process ready for when that is not here.

    Starting one takes seconds at its priority, and what it has to load stands in the way of those who decode. So one is
    started as soon as there is anything large to stage, while nobody decodes, and is used again.

    Args:
        executor: runs what is done here.
        threads: of a process of its own.
        log: takes an event name and fields.

    """

    def __init__(self, executor: PacedExecutor, threads: int, log: Callable[..., None]) -> None:
        self.executor = executor
        self._threads = threads
        self._log = log
        self._lock = threading.Lock()
        self._spare: _Spare | None = None
        self._lent = 0
        self._closed = False

    def new(self, nbytes: int) -> Staging:
        """For one transition that has so many bytes to read and prove."""
        process = self.process(nbytes)
        return Stager(self.executor) if process is None else ApartStager(process, self.executor, self.give_back)

    def process(self, nbytes: int) -> StagingProcess | None:
        """One of its own, where it pays: somebody decodes, and there is much to do. Whoever has it gives it back."""
        if nbytes < APART_BYTES:
            return None
        if not self.executor.decoding_goes_on():
            self._have_one_ready()
            return None
        with self._lock:
            spare, self._spare = self._spare, None
        process = spare.process if spare is not None and spare.await_ready() else self._started()
        if process is not None:
            with self._lock:
                self._lent += 1
        return process

    def give_back(self, process: StagingProcess) -> None:
        """Keep it for the next, if it has done all that it was told; else end it, and what it holds with it."""
        with self._lock:
            self._lent -= 1
            if process.idle and self._spare is None and not self._closed:
                self._spare = _Spare(process, process.submit(Forget()))
                return
        process.close()

    def close(self) -> None:
        """End the one that is kept, and keep no more."""
        with self._lock:
            self._closed = True
            if self._spare is not None:
                self._spare.process.close()

    def _have_one_ready(self) -> None:
        with self._lock:
            if self._lent == 0 and not self._closed and (self._spare is None or not self._spare.process.alive):
                process = self._started()
                self._spare = _Spare(process) if process is not None else None

    def _started(self) -> StagingProcess | None:
        try:
            return StagingProcess(self._threads)
        except OSError as error:
            self._log("staging.not_apart", error=str(error))
            return None


@dataclass(frozen=True)
class _Spare:
    """A process that waits for its next user.

    Attributes:
        forgotten: done when it has let go of what it had from the one before.

    """

    process: StagingProcess
    forgotten: Future[None] | None = None

    def await_ready(self) -> bool:
        """Whether it can be used, once it has let go."""
        if self.forgotten is not None:
            with suppress(Exception):
                self.forgotten.result()
        return self.process.idle


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
            self._stagers.give_back(process)
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
