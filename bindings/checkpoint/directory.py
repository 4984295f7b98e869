"""A checkpoint directory: its files, tensors, config and assets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rowlock.bindings.checkpoint.assets import Assets, read_assets
from rowlock.bindings.checkpoint.config import read_config, tied_aliases
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.files import Folder, OpenFile
from rowlock.bindings.checkpoint.header import Extent, parse_json_strictly, read_header
from rowlock.bindings.checkpoint.stamps import FileStamp
from rowlock.bindings.checkpoint.tensor_files import TensorFiles
from rowlock.bindings.checkpoint.tensors import Bytes, TensorInfo

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
INDEX_BYTES_MAX: Final = 100_000_000


class Checkpoint:
    """An open checkpoint directory.

    Each weight file is opened once, and header and bytes come from that descriptor: a file
    replaced by rename while a transition runs is not read half old, half new. Bytes are
    only ever copied out; nothing here is a mapping of a file. Safe for use by several
    threads (positional reads only).

    Attributes:
        directory: where it really is.
        config: parsed ``config.json``.
        assets: tokenizer and friends.
        files: its tensors, where they lie.

    """

    def __init__(self, folder: Folder) -> None:
        self._closing = ExitStack()
        self._folder = folder
        self._closing.callback(folder.close)
        self._files: dict[str, OpenFile] = {}
        try:
            self.directory = folder.path
            self.config: dict[str, Any] = read_config(folder)
            self.assets: Assets = read_assets(folder)
            self.files = TensorFiles(self._read_extents(folder), self._files)
        except BaseException:
            self._closing.close()
            raise

    @classmethod
    def open(cls, directory: Path, roots: Iterable[Path] = ()) -> Self:
        """Parse a directory in full: config, assets, every header, the index.

        Args:
            directory: a Hugging Face checkpoint.
            roots: if given, everything must really lie below one of them.

        Raises:
            CheckpointError: naming the file and the field.

        """
        return cls(Folder(directory, roots))

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return self.files.tensors

    @property
    def extents(self) -> Mapping[str, Extent]:
        """Where each tensor lies, by tensor name."""
        return self.files.extents

    @property
    def own_tensors(self) -> dict[str, TensorInfo]:
        """Without those that the config ties to another: what a manifest holds."""
        aliases = tied_aliases(self.config)
        return {name: info for name, info in self.tensors.items() if name not in aliases}

    @property
    def stamps(self) -> dict[str, FileStamp]:
        """Device, inode, size and times of each weight file when it was opened, by file name."""
        return {name: file.stamp for name, file in self._files.items()}

    def read_into(self, tensor: str, offset: int, out: Bytes) -> None:
        """Copy ``out.nbytes`` bytes of a tensor, from its byte ``offset`` on, into ``out``.

        Raises:
            CheckpointError: UNREADABLE, or CHANGED when the file has become shorter.

        """
        self.files.read_into(tensor, offset, out)

    def read_local(self, name: str, limit: int) -> bytes | None:
        """A further file of the directory, as strictly opened as the others; None if it cannot be had."""
        try:
            file = self._folder.open(name)
            if file is None:
                return None
            try:
                return file.read(limit)
            finally:
                file.close()
        except CheckpointError:
            return None

    def check_unchanged(self) -> None:
        """Raise CHANGED when a weight file was written to since it was opened."""
        for file in self._files.values():
            if not file.unchanged:
                raise CheckpointError(
                    CheckpointFault.CHANGED,
                    file.path,
                    "was written to while it was being read",
                    "write a new directory and rename it into place; never rewrite a checkpoint",
                )

    def close(self) -> None:
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_extents(self, folder: Folder) -> dict[str, Extent]:
        index = folder.open(INDEX_FILE)
        if index is None:
            return {extent.tensor.name: extent for extent in self._read_file(folder, SINGLE_FILE)}
        try:
            single = folder.open(SINGLE_FILE)
            if single is not None:
                single.close()
                raise CheckpointError(
                    CheckpointFault.INDEX,
                    index.path,
                    f"stands beside {SINGLE_FILE}: loaders disagree on which one counts",
                    "remove the one that is not meant",
                )
            return self._read_sharded(folder, index.path, _read_index(index))
        finally:
            index.close()

    def _read_sharded(self, folder: Folder, index: Path, weight_map: dict[str, str]) -> dict[str, Extent]:
        extents: dict[str, Extent] = {}
        for shard in sorted(set(weight_map.values())):
            for extent in self._read_file(folder, shard):
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

    def _read_file(self, folder: Folder, name: str) -> list[Extent]:
        file = folder.open(name)
        if file is None:
            raise CheckpointError(CheckpointFault.NOT_FOUND, folder.path / name, "no such file")
        self._closing.callback(file.close)
        self._files[name] = file
        return read_header(file)


def _read_index(index: OpenFile) -> dict[str, str]:
    try:
        parsed = parse_json_strictly(index.read(INDEX_BYTES_MAX))
    except ValueError as error:
        raise CheckpointError(CheckpointFault.INDEX, index.path, f"is not valid JSON: {error}") from None
    weight_map = parsed.get("weight_map") if isinstance(parsed, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(CheckpointFault.INDEX, index.path, "has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_file_name(shard):
            raise CheckpointError(
                CheckpointFault.INDEX,
                index.path,
                f"weight_map sends {name!r} to {shard!r}, not a file of this directory",
            )
    return weight_map


def _is_file_name(name: str) -> bool:
    """A plain name: no path, no NUL, nothing that UTF-8 cannot write."""
    return (
        name not in {"", ".", ".."}
        and "/" not in name
        and "\0" not in name
        and len(name.encode("utf-8", "replace")) <= 255
        and not any("\ud800" <= character <= "\udfff" for character in name)
    )
