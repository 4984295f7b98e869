"""Directories of compiled graphs, as optimum-rbln 0.12.0 writes them: weights lie inside, out of reach.

::

    config.json  rbln_config.json  prefill.rbln  decoder_batch_1.rbln  tokenizer.json ...

Of the settings in ``rbln_config.json`` those are understood that decide how the graphs are called; one
that asks for another call than :mod:`rowlock.bindings.atom.artifacts` makes is refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from rowlock.bindings.checkpoint.assets import Assets, read_assets
from rowlock.bindings.checkpoint.config import program_digest, read_config
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.files import Folder, OpenFile
from rowlock.bindings.checkpoint.header import parse_json_strictly
from rowlock.bindings.checkpoint.stamps import FileStamp
from rowlock.bindings.checkpoint.tensors import Bytes

SETTINGS_FILE: Final = "rbln_config.json"
SETTINGS_BYTES_MAX: Final = 10_000_000
GRAPHS: Final = ("prefill", "decoder_batch_1")
"""One request at a time: its prompt in chunks, then token by token."""
HASH_BYTES: Final = 4 * 1024 * 1024
_OFF: Final = ("use_attention_mask", "use_inputs_embeds", "use_local_attention", "use_lora", "use_position_ids")


@dataclass(frozen=True)
class Graph:
    """One compiled graph.

    Attributes:
        path: its file.
        sha256: of the whole file, hex.
        stamp: of the file when it was hashed.

    """

    name: str
    path: str
    sha256: str
    stamp: FileStamp


@dataclass(frozen=True)
class Artifact:
    """Everything that decides what the graphs compute, and how they are called.

    Attributes:
        revision: SHA-256 of the settings file, hex.
        context: tokens of the longest sequence.
        chunk: tokens of one prefill call.
        blocks: K/V blocks of one sequence.

    """

    graphs: tuple[Graph, ...]
    revision: str
    context: int
    chunk: int
    blocks: int

    def program(self, config: dict[str, Any]) -> str:
        """The program digest: config, settings and every graph."""
        parts = [f"settings {self.revision}", *(f"{graph.name} {graph.sha256}" for graph in self.graphs)]
        return program_digest(config, tuple(part.encode() for part in parts))


class ArtifactDirectory:
    """An open directory of compiled graphs. A source without rows: everything comes with the graphs.

    Attributes:
        directory: where it really is.
        config: parsed ``config.json``.
        assets: tokenizer and friends.
        artifact: graphs and settings; each file was hashed whole, now.

    """

    def __init__(self, folder: Folder) -> None:
        with ExitStack() as closing:
            closing.callback(folder.close)
            self._folder = folder
            self._files: list[OpenFile] = []
            closing.callback(self._close_files)
            self.directory = folder.path
            self.config = read_config(folder)
            self.assets: Assets = read_assets(folder)
            self.artifact = self._read()
            self._closing = closing.pop_all()

    @classmethod
    def find(cls, directory: Path, roots: Iterable[Path] = ()) -> Self | None:
        """The directory, opened; None when it holds no compiled graphs.

        Raises:
            CheckpointError: naming the file and the field.

        """
        folder = Folder(directory, roots)
        settings = folder.open(SETTINGS_FILE)
        if settings is None:
            folder.close()
            return None
        settings.close()
        return cls(folder)

    @property
    def stamps(self) -> dict[str, FileStamp]:
        return {Path(graph.path).name: graph.stamp for graph in self.artifact.graphs}

    def read_into(self, tensor: str, offset: int, out: Bytes) -> None:
        raise AssertionError(f"{tensor}: compiled graphs have no tensors to read")

    def close(self) -> None:
        self._closing.close()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()

    def _read(self) -> Artifact:
        content = self._open(SETTINGS_FILE).read(SETTINGS_BYTES_MAX)
        settings = self._parse(content)
        context, chunk = self._size(settings, "max_seq_len"), self._size(settings, "prefill_chunk_size")
        block = self._size(settings, "kvcache_block_size")
        for key in _OFF:
            if settings.get(key):
                raise self._refused(key, settings[key], "false")
        for key, wanted in (("batch_size", 1), ("logits_to_keep", 1)):
            if settings.get(key) != wanted:
                raise self._refused(key, settings.get(key), str(wanted))
        if context % block or settings.get("kvcache_num_blocks", context // block) < context // block:
            raise self._refused("kvcache_block_size", block, f"blocks that hold {context} tokens (max_seq_len)")
        graphs = tuple(self._graph(name) for name in GRAPHS)
        return Artifact(graphs, hashlib.sha256(content).hexdigest(), context, chunk, context // block)

    def _graph(self, name: str) -> Graph:
        file = self._open(f"{name}.rbln")
        hasher = hashlib.sha256()
        for offset in range(0, file.stamp.size, HASH_BYTES):
            hasher.update(file.read_at(offset, min(HASH_BYTES, file.stamp.size - offset)))
        if not file.unchanged:
            raise CheckpointError(CheckpointFault.CHANGED, file.path, "was written to while it was being read")
        return Graph(name, str(file.path), hasher.hexdigest(), file.stamp)

    def _open(self, name: str) -> OpenFile:
        file = self._folder.open(name)
        if file is None:
            raise CheckpointError(
                CheckpointFault.NOT_FOUND, self.directory / name, "no such file", "give a directory of optimum-rbln"
            )
        self._files.append(file)
        return file

    def _parse(self, content: bytes) -> dict[str, Any]:
        try:
            settings = parse_json_strictly(content)
        except ValueError as error:
            raise CheckpointError(
                CheckpointFault.MALFORMED, self.directory / SETTINGS_FILE, f"is not valid JSON: {error}"
            ) from None
        if not isinstance(settings, dict):
            raise CheckpointError(CheckpointFault.MALFORMED, self.directory / SETTINGS_FILE, "is not a JSON object")
        return settings

    def _size(self, settings: dict[str, Any], key: str) -> int:
        value = settings.get(key)
        if type(value) is not int or not 0 < value < 2**31:
            raise self._refused(key, value, "a positive integer")
        return value

    def _refused(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(
            CheckpointFault.UNSUPPORTED,
            self.directory / SETTINGS_FILE,
            f"{key} is {str(value)[:80]!r}; these graphs are called with {wanted}",
        )
