"""Hashing groups of tensor bytes on worker threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

import numpy as np
from blake3 import blake3

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.manifest import Manifest, TensorManifest
from rowlock.bindings.checkpoint.tensor_files import TensorFiles
from rowlock.bindings.checkpoint.tensors import Bytes, TensorInfo

CHUNK_BYTES: Final = 4 * 1024 * 1024
"""Bytes per job: large enough to hide the hand-over between threads."""

READ_BYTES: Final = 2 * 1024 * 1024
"""Bytes read from a file before they are hashed: few calls, and what was read is still in a cache."""

Progress = Callable[[int], None]
"""Called with the number of bytes just done; from any thread."""


def no_progress(_count: int) -> None:
    """Report nothing."""


class Hasher:
    """Computes group digests with an executor's threads.

    Blocks the calling thread until done, so never call it from a thread of the same
    executor, nor from the owner thread.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._scratch = threading.local()

    def manifest(
        self, checkpoint: Checkpoint, aliases: Mapping[str, str], progress: Progress = no_progress
    ) -> Manifest:
        """Read every tensor of a checkpoint once and digest it.

        Args:
            checkpoint: open; its files must not change meanwhile.
            aliases: alias tensor -> the tensor it repeats; an alias must hold equal
                bytes, and is left out of the result.
            progress: told of the bytes done.

        Raises:
            CheckpointError: unreadable, changed meanwhile, or an alias that differs.

        """
        digests = self.tensor_digests(checkpoint.files, progress)
        tensors = {name: TensorManifest(info, digests[name]) for name, info in checkpoint.tensors.items()}
        checkpoint.check_unchanged()
        for alias, original in aliases.items():
            if alias in tensors:
                _check_alias(checkpoint, tensors.pop(alias), tensors.get(original))
        return Manifest.of(tensors.values())

    def tensor_digests(self, files: TensorFiles, progress: Progress = no_progress) -> dict[str, bytes]:
        """Group digests, concatenated, of every tensor, by name. Raises CheckpointError."""

        def job(pieces: list[_Piece]) -> list[bytes]:
            found = [self._piece_digests(files, piece) for piece in pieces]
            progress(sum(piece.stop - piece.start for piece in pieces))
            return found

        batches = list(_batches(files.tensors.values()))
        jobs = [self._executor.submit(job, batch) for batch in batches]
        parts: dict[str, list[bytes]] = {name: [] for name in files.extents}
        try:
            for batch, future in zip(batches, jobs, strict=True):
                for piece, digests in zip(batch, future.result(), strict=True):
                    parts[piece.info.name].append(digests)
        finally:
            for future in jobs:
                future.cancel()
        return {name: b"".join(digests) for name, digests in parts.items()}

    def _piece_digests(self, files: TensorFiles, piece: _Piece) -> bytes:
        group_bytes = piece.info.group_rows * piece.info.row_bytes
        step = max(READ_BYTES // group_bytes, 1) * group_bytes
        parts = []
        for position in range(piece.start, piece.stop, step):
            buffer = self._buffer(min(step, piece.stop - position))
            files.read_into(piece.info.name, position, buffer)
            parts.append(hash_groups(buffer, group_bytes))
        return b"".join(parts)

    def _buffer(self, nbytes: int) -> Bytes:
        """The scratch buffer of this thread; its content dies with the next call."""
        buffer: Bytes | None = getattr(self._scratch, "buffer", None)
        if buffer is None or buffer.nbytes < nbytes:
            buffer = np.empty(max(nbytes, READ_BYTES), np.uint8)
            self._scratch.buffer = buffer
        return buffer[:nbytes]


def hash_groups(data: Bytes, group_bytes: int) -> bytes:
    """Digests of consecutive groups; the last may be shorter."""
    view = data.data
    return b"".join(
        blake3(view[start : start + group_bytes]).digest() for start in range(0, data.nbytes, group_bytes or 1)
    )


def chunks(info: TensorInfo, groups: range, nbytes: int = CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """Byte ranges of about ``nbytes`` that cover consecutive whole groups."""
    if info.row_bytes == 0:
        return
    group_bytes = info.group_rows * info.row_bytes
    step = max(nbytes // group_bytes, 1)
    for first in range(groups.start, groups.stop, step):
        stop = min(first + step, groups.stop)
        yield first * group_bytes, min(stop * group_bytes, info.nbytes)


@dataclass(frozen=True)
class _Piece:
    """Bytes ``start`` to ``stop`` of a tensor: whole groups."""

    info: TensorInfo
    start: int
    stop: int


def _batches(tensors: Iterable[TensorInfo]) -> Iterator[list[_Piece]]:
    """All pieces of some tensors, in order, several small ones together: a job costs as much as hashing 100 KiB."""
    batch: list[_Piece] = []
    filled = 0
    for info in tensors:
        for start, stop in chunks(info, range(info.groups)):
            batch.append(_Piece(info, start, stop))
            filled += stop - start
            if filled >= CHUNK_BYTES:
                yield batch
                batch, filled = [], 0
    if batch:
        yield batch


def _check_alias(checkpoint: Checkpoint, alias: TensorManifest, original: TensorManifest | None) -> None:
    same = original is not None and (alias.info.dtype, alias.info.shape, alias.digests) == (
        original.info.dtype,
        original.info.shape,
        original.digests,
    )
    if not same:
        raise CheckpointError(
            CheckpointFault.ALIAS,
            checkpoint.extents[alias.info.name].path,
            f"{alias.info.name!r} is tied to {original.info.name if original else 'an absent tensor'!r} "
            "by the config, but holds other bytes",
            "set tie_word_embeddings to false in config.json, or write equal tensors",
        )
