"""Manifests kept beside the files they were made from, so that they are made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.manifest import Manifest, ManifestError

LOCAL_NAME: Final = Path(".rowlock") / "manifest.safetensors"
"""Where `rowlock manifest` leaves a manifest inside a checkpoint directory."""


@dataclass(frozen=True)
class ManifestCache:
    """Manifests by checkpoint directory, each valid only for the very files it was made from.

    A cached manifest only saves time: a transition still hashes what it stages.

    Attributes:
        directory: where they are kept.
        write: stores bytes under a path so that a reader sees all of them or none.

    """

    directory: Path
    write: Callable[[Path, bytes], None]

    def find(self, checkpoint: Checkpoint) -> Manifest | None:
        """The manifest of exactly these files and exactly these tensors, or None."""
        for path in (self._path(checkpoint), checkpoint.directory / LOCAL_NAME):
            try:
                manifest, stamps = Manifest.parse(path, path.read_bytes())
            except (OSError, ManifestError):
                continue
            infos = {name: tensor.info for name, tensor in manifest.tensors.items()}
            if stamps == checkpoint.stamps and infos == checkpoint.own_tensors:
                return manifest
        return None

    def store(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        self.write(self._path(checkpoint), manifest.serialise(checkpoint.stamps))

    def _path(self, checkpoint: Checkpoint) -> Path:
        key = blake3(str(checkpoint.directory).encode()).hexdigest()[:32]
        return self.directory / f"{key}.safetensors"
