"""Manifests kept beside the files they were made from, so that they are made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.manifest import Manifest, ManifestError
from rowlock.bindings.checkpoint.stamps import FileStamp

MANIFEST_BYTES_MAX: Final = 1024**3
LOCAL_NAME: Final = Path(".rowlock") / "manifest.safetensors"
"""Where `rowlock manifest` leaves a manifest inside a checkpoint directory."""


@dataclass(frozen=True)
class ManifestCache:
    """Manifests by checkpoint directory, each valid only for the very files it was made from.

    A cached manifest only saves time: a transition still hashes what it stages.

    Attributes:
        directory: where they are kept.
        read: all bytes of a file there; raises OSError.
        write: stores bytes under a path so that a reader sees all of them or none.

    """

    directory: Path
    read: Callable[[Path], bytes]
    write: Callable[[Path, bytes], None]

    def find(self, checkpoint: Checkpoint) -> Manifest | None:
        """The manifest of exactly these files and exactly these tensors, or None."""
        path = self._path(checkpoint.directory)
        for data in (self._stored(path), checkpoint.read_local(str(LOCAL_NAME), MANIFEST_BYTES_MAX)):
            if data is None:
                continue
            try:
                manifest, stamps = Manifest.parse(path, data)
            except ManifestError:
                continue
            infos = {name: tensor.info for name, tensor in manifest.tensors.items()}
            if stamps == checkpoint.stamps and infos == checkpoint.own_tensors:
                return manifest
        return None

    def store(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        self.write(self._path(checkpoint.directory), manifest.serialise(checkpoint.stamps))

    def stamps(self, directory: Path, root: str) -> dict[str, FileStamp]:
        """The stamps of the files in a directory when they had this weights root; empty if that is not known."""
        path = self._path(directory)
        try:
            manifest, stamps = Manifest.parse(path, self.read(path))
        except (OSError, ManifestError):
            return {}
        return stamps if manifest.root == root else {}

    def _path(self, directory: Path) -> Path:
        key = blake3(str(directory).encode()).hexdigest()[:32]
        return self.directory / f"{key}.safetensors"

    def _stored(self, path: Path) -> bytes | None:
        try:
            return self.read(path)
        except OSError:
            return None
