"""What the process that stages is told to do: each order, and how it is carried out there.

Orders and answers are pickled: both ends are this program, over a pair of sockets that nobody else has.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from rowlock.bindings.checkpoint.files import OpenFile
from rowlock.bindings.checkpoint.hashing import Hasher, Progress
from rowlock.bindings.checkpoint.header import Extent
from rowlock.bindings.checkpoint.manifest import Manifest
from rowlock.bindings.checkpoint.tensor_files import TensorFiles
from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.model.layout import Layout
from rowlock.daemon.owner.images import buffer_bytes
from rowlock.daemon.owner.sources import Groups, OverlaySource, RowSource
from rowlock.daemon.owner.stage import Stager
from rowlock.daemon.owner.staging import Part, Settled
from rowlock.daemon.staging.shared import SharedImages


@dataclass(frozen=True)
class Desk:
    """What the process that stages works with.

    Attributes:
        executor: runs the pieces.
        images: by number.
        memory: descriptors of their memory, by number.

    """

    executor: Executor
    images: dict[int, SharedImages] = field(default_factory=dict)
    memory: dict[int, int] = field(default_factory=dict)

    @property
    def stager(self) -> Stager:
        return Stager(self.executor)


class Order(Protocol):
    """Something to do."""

    def carry_out(self, desk: Desk, descriptors: Sequence[int], progress: Progress) -> Any:
        """Do it. Descriptors that came along are this order's to close; the result goes back."""
        ...


@dataclass(frozen=True)
class Share:
    """Map images. Comes with the descriptor of their memory."""

    number: int
    sizes: Mapping[str, int]

    def carry_out(self, desk: Desk, descriptors: Sequence[int], _progress: Progress) -> None:
        desk.images[self.number] = SharedImages.attach(self.number, descriptors[0], self.sizes)
        desk.memory[self.number] = descriptors[0]


@dataclass(frozen=True)
class Reserve:
    """Take the memory of images, all of it."""

    number: int

    def carry_out(self, desk: Desk, _descriptors: Sequence[int], _progress: Progress) -> None:
        images = desk.images[self.number]
        nbytes = buffer_bytes({name: image.nbytes for name, image in images.items()})
        try:
            os.posix_fallocate(desk.memory[self.number], 0, nbytes)
        except OSError as error:
            raise MemoryError(f"{nbytes} bytes for images cannot be had: {error.strerror}") from error


@dataclass(frozen=True)
class Forget:
    """Let go of all images, and of their memory."""

    def carry_out(self, desk: Desk, _descriptors: Sequence[int], _progress: Progress) -> None:
        desk.images.clear()
        while desk.memory:
            os.close(desk.memory.popitem()[1])


@dataclass(frozen=True)
class FileList:
    """Open files whose descriptors come with an order, in this order.

    Attributes:
        paths: of the files.
        extents: where tensors lie in them, by tensor name.

    """

    paths: tuple[Path, ...]
    extents: Mapping[str, Extent]

    @classmethod
    def of(cls, files: TensorFiles) -> tuple[Self, list[int]]:
        """The list of some files, and their descriptors."""
        opened = list(files.files.values())
        paths = tuple(file.path for file in opened)
        return cls(paths, dict(files.extents)), [file.descriptor for file in opened]

    def open(self, descriptors: Sequence[int]) -> TensorFiles:
        opened = [OpenFile(path, descriptor) for path, descriptor in zip(self.paths, descriptors, strict=True)]
        return TensorFiles(self.extents, {file.path.name: file for file in opened})


@dataclass(frozen=True)
class InPlaceSource:
    """Bytes that lie in the images already."""

    def read_into(self, tensor: str, offset: int, out: Bytes) -> None:
        """They are there."""

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class Stage:
    """Read groups into images, and check each. See :meth:`rowlock.daemon.owner.staging.Staging.stage`.

    Attributes:
        files: to read from; None: the owner has put the bytes into the images, and they are only checked.
        overlay: groups that lie over the files.

    """

    files: FileList | None
    overlay: Mapping[tuple[str, int], bytes]
    manifest: Manifest
    layout: Layout
    images: int
    wanted: Mapping[str, Sequence[int]]
    whole: bool

    def carry_out(self, desk: Desk, descriptors: Sequence[int], _progress: Progress) -> None:
        source = self._source(descriptors)
        try:
            images = desk.images[self.images]
            desk.stager.stage(source, self.manifest, self.layout, images, self.wanted, whole=self.whole)
        finally:
            source.close()

    def _source(self, descriptors: Sequence[int]) -> RowSource:
        if self.files is None:
            return InPlaceSource()
        files = self.files.open(descriptors)
        groups: Groups = {key: memoryview(data) for key, data in self.overlay.items()}
        return OverlaySource(files, files.tensors, groups) if groups else files


@dataclass(frozen=True)
class Settle:
    """Settle a parent. See :meth:`rowlock.daemon.owner.staging.Staging.settle`."""

    before: int
    expected: int
    parts: Sequence[Part]
    sparse: bool

    def carry_out(self, desk: Desk, _descriptors: Sequence[int], _progress: Progress) -> Settled:
        before, expected = desk.images[self.before], desk.images[self.expected]
        jobs = desk.stager.settle(before, expected, self.parts, sparse=self.sparse)
        return Settled.together(job.result() for job in jobs)


@dataclass(frozen=True)
class CountNonfinite:
    """How many values are infinite or NaN."""

    images: int
    layout: Layout

    def carry_out(self, desk: Desk, _descriptors: Sequence[int], _progress: Progress) -> int:
        return desk.stager.nonfinite(desk.images[self.images], self.layout)


@dataclass(frozen=True)
class Digest:
    """Digest every tensor of some files. See :meth:`rowlock.bindings.checkpoint.hashing.Hasher.tensor_digests`."""

    files: FileList

    def carry_out(self, desk: Desk, descriptors: Sequence[int], progress: Progress) -> dict[str, bytes]:
        files = self.files.open(descriptors)
        try:
            return Hasher(desk.executor).tensor_digests(files, progress)
        finally:
            files.close()


@dataclass(frozen=True)
class Step:
    """Some bytes of an order are done."""

    number: int
    count: int


@dataclass(frozen=True)
class Done:
    """An order is carried out."""

    number: int
    result: Any


@dataclass(frozen=True)
class Failed:
    """An order cannot be carried out."""

    number: int
    error: BaseException


Answer = Step | Done | Failed
