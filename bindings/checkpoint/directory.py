"""A checkpoint directory: its files, tensors, config and assets."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from rowlock.bindings.checkpoint.assets import Assets, read_assets
from rowlock.bindings.checkpoint.config import read_config
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.header import Extent, parse_json_strictly, read_header
from rowlock.bindings.checkpoint.stamps import FileStamp, stamp_of
from rowlock.bindings.checkpoint.tensors import TensorInfo

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
INDEX_BYTES_MAX: Final = 100_000_000

Bytes = npt.NDArray[np.uint8]
"""A contiguous one-dimensional buffer of bytes."""


class Checkpoint:
    """An open checkpoint directory.

    The weight files stay open, so that a file replaced by rename while a transition
    runs is not read half old, half new. Bytes are only ever copied out; nothing here is
    a mapping of a file. Safe for use by several threads (positional reads only).

    Attributes:
        directory: the resolved directory.
        config: parsed ``config.json``.
        assets: tokenizer and friends.
        extents: where each tensor lies, by tensor name.

    """

    def __init__(self, directory: Path, config: dict[str, Any], assets: Assets, extents: dict[str, Extent]) -> None:
        self.directory = directory
        self.config = config
        self.assets = assets
        self.extents = extents
        self._files = ExitStack()
        self._descriptors: dict[Path, int] = {}
        self._stamps: dict[Path, FileStamp] = {}
        try:
            for path in sorted({extent.path for extent in extents.values()}):
                self._open_file(path)
        except BaseException:
            self._files.close()
            raise

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Parse a directory in full: config, assets, every header, the index.

        Raises:
            CheckpointError: naming the file and the field.

        """
        resolved = directory.resolve()
        if not resolved.is_dir():
            raise CheckpointError(
                CheckpointFault.NOT_FOUND,
                directory,
                "no such directory",
                "check the path on the owner's machine",
            )
        return cls(resolved, read_config(resolved), read_assets(resolved), _read_extents(resolved))

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: extent.tensor for name, extent in self.extents.items()}

    @property
    def stamps(self) -> dict[str, FileStamp]:
        """Device, inode, size and times of each weight file when it was opened, by file name."""
        return {path.name: stamp for path, stamp in self._stamps.items()}

    def read_into(self, tensor: str, offset: int, out: Bytes) -> None:
        """Copy ``out.nbytes`` bytes of a tensor, from its byte ``offset`` on, into ``out``.

        Raises:
            CheckpointError: UNREADABLE, or CHANGED when the file has become shorter.

        """
        extent = self.extents[tensor]
        assert 0 <= offset <= extent.tensor.nbytes - out.nbytes
        position, view = extent.offset + offset, out.data
        while view:
            try:
                count = os.preadv(self._descriptors[extent.path], [view], position)
            except OSError as error:
                raise CheckpointError(CheckpointFault.UNREADABLE, extent.path, str(error)) from error
            if count == 0:
                raise CheckpointError(
                    CheckpointFault.CHANGED, extent.path, f"ends at byte {position}, inside tensor {tensor!r}"
                )
            position, view = position + count, view[count:]

    def check_unchanged(self) -> None:
        """Raise CHANGED when a weight file was written to since it was opened."""
        for path, descriptor in self._descriptors.items():
            if stamp_of(os.fstat(descriptor)).content_key != self._stamps[path].content_key:
                raise CheckpointError(
                    CheckpointFault.CHANGED,
                    path,
                    "was written to while it was being read",
                    "write a new directory and rename it into place; never rewrite a checkpoint",
                )

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_file(self, path: Path) -> None:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(CheckpointFault.UNREADABLE, path, str(error)) from error
        self._files.callback(os.close, descriptor)
        self._descriptors[path] = descriptor
        self._stamps[path] = stamp_of(os.fstat(descriptor))


def _read_extents(directory: Path) -> dict[str, Extent]:
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() and index.exists():
        raise CheckpointError(
            CheckpointFault.INDEX,
            index,
            f"stands beside {SINGLE_FILE}: loaders disagree on which one counts",
            "remove the one that is not meant",
        )
    if index.exists():
        return _read_sharded(directory, index)
    return {extent.tensor.name: extent for extent in read_header(single)}


def _read_sharded(directory: Path, index: Path) -> dict[str, Extent]:
    weight_map = _read_index(index)
    extents: dict[str, Extent] = {}
    for shard in sorted(set(weight_map.values())):
        for extent in read_header(directory / shard):
            name = extent.tensor.name
            if name in extents:
                raise CheckpointError(
                    CheckpointFault.DUPLICATE,
                    extent.path,
                    f"tensor {name!r} is also in {extents[name].path.name}",
                )
            if weight_map.get(name) != shard:
                raise CheckpointError(
                    CheckpointFault.INDEX,
                    index,
                    f"weight_map says {weight_map.get(name)!r} for {name!r}, which is in {shard}",
                )
            extents[name] = extent
    absent = sorted(set(weight_map) - set(extents))
    if absent:
        raise CheckpointError(
            CheckpointFault.INDEX,
            index,
            f"{absent[0]!r} is not in {weight_map[absent[0]]}, where weight_map has it",
        )
    return extents


def _read_index(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > INDEX_BYTES_MAX:
            raise CheckpointError(CheckpointFault.INDEX, index, f"is over the limit of {INDEX_BYTES_MAX} bytes")
        parsed = parse_json_strictly(index.read_bytes())
    except ValueError as error:
        raise CheckpointError(CheckpointFault.INDEX, index, f"is not valid JSON: {error}") from None
    except OSError as error:
        raise CheckpointError(CheckpointFault.UNREADABLE, index, str(error)) from error
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(CheckpointFault.INDEX, index, "has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in {"", ".", ".."}:
            raise CheckpointError(
                CheckpointFault.INDEX,
                index,
                f"weight_map sends {name!r} to {shard!r}, not a file of this directory",
            )
    return weight_map
