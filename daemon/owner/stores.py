"""The state directory, less the journal: undo files, manifests and assets of generations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from rowlock.bindings.checkpoint.assets import ASSET_FILES, Assets
from rowlock.bindings.checkpoint.cache import ManifestCache
from rowlock.bindings.checkpoint.manifest import Manifest, ManifestError
from rowlock.bindings.checkpoint.stamps import FileStamp, stamp_of
from rowlock.bindings.plan import Model
from rowlock.journal.files import Files
from rowlock.journal.undo import UndoFiles
from rowlock.v1.errors import OwnerError, Reason

UNDO_KEPT: Final = 8
"""Undo files kept, newest first; older ones are deleted when a newer generation is published."""


@dataclass(frozen=True)
class Stores:
    """Content kept so that an owner does not depend on checkpoints staying as they are.

    Attributes:
        undo: before-images by transition.
        manifests: directory of manifests by weights root.
        assets: directory of assets by digest.

    """

    files: Files
    undo: UndoFiles
    manifests: Path
    assets: Path

    @classmethod
    def under(cls, directory: Path, files: Files) -> Self:
        return cls(files, UndoFiles(directory / "undo", files), directory / "manifests", directory / "assets")

    def cache(self) -> ManifestCache:
        """Manifests of checkpoint directories, by path."""
        return ManifestCache(self.manifests / "by-path", lambda path, data: self.files.write(path, [data]))

    def keep(self, model: Model, assets: Assets, stamps: Mapping[str, FileStamp]) -> None:
        """Make manifest and assets of an identity durable, before it can be published."""
        path = self._manifest_path(model.manifest.root)
        self.files.write(path, [model.manifest.serialise(stamps)])
        directory = self.assets / assets.digest
        for name, content in assets.files.items():
            if not (directory / name).exists():
                self.files.write(directory / name, [content])

    def manifest(self, root: str) -> tuple[Manifest, dict[str, FileStamp]]:
        """The manifest of a published weights root, and the stamps of the files it came from.

        Raises:
            OwnerError: ROLLBACK_UNAVAILABLE when it is missing or damaged.

        """
        path = self._manifest_path(root)
        try:
            manifest, stamps = Manifest.parse(path, self.files.read(path))
        except (OSError, ManifestError) as error:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"manifest of {root[:12]}: {error}") from error
        if manifest.root != root:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"{path}: is the manifest of {manifest.root[:12]}")
        return manifest, stamps

    def kept_assets(self, digest: str) -> Assets:
        """The assets of a published identity.

        Raises:
            OwnerError: ROLLBACK_UNAVAILABLE when they are missing or damaged.

        """
        directory = self.assets / digest
        present = [name for name in ASSET_FILES if (directory / name).exists()]
        assets = Assets({name: self.files.read(directory / name) for name in present})
        if assets.digest != digest:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"{directory}: missing or damaged")
        return assets

    def rebuildable(self, root: str, checkpoint: Path) -> bool:
        """Whether a checkpoint directory still holds the very files that a root was digested from."""
        try:
            _, stamps = self.manifest(root)
            return bool(stamps) and all(stamp_of((checkpoint / name).stat()) == stamp for name, stamp in stamps.items())
        except (OSError, OwnerError):
            return False

    def _manifest_path(self, root: str) -> Path:
        return self.manifests / "by-root" / f"{root}.safetensors"
