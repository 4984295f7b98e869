"""The state directory, less the journal: undo files, pushed rows, manifests and assets."""

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
"""Generations whose undo and pushed rows are kept, newest first; older ones go at a later publish."""


@dataclass(frozen=True)
class Stores:
    """Content kept so that an owner does not depend on checkpoints staying as they are.

    Attributes:
        undo: before-images by transition.
        pushed: rows that came over the wire, by overlay name.
        manifests: directory of manifests by weights root.
        assets: directory of assets by digest.

    """

    files: Files
    undo: UndoFiles
    pushed: UndoFiles
    manifests: Path
    assets: Path

    @classmethod
    def under(cls, directory: Path, files: Files) -> Self:
        return cls(
            files,
            UndoFiles(directory / "undo", files),
            UndoFiles(directory / "pushed", files),
            directory / "manifests",
            directory / "assets",
        )

    def cache(self) -> ManifestCache:
        """Manifests of checkpoint directories, by path."""
        return ManifestCache(self.manifests / "by-path", lambda path, data: self.files.write(path, [data]))

    def keep(self, model: Model, assets: Assets) -> None:
        """Make manifest and assets of an identity durable, before it can be published."""
        path = self._manifest_path(model.manifest.root)
        if not path.exists():
            self.files.write(path, [model.manifest.serialise()])
        directory = self.assets / assets.digest
        for name, content in assets.files.items():
            if not (directory / name).exists():
                self.files.write(directory / name, [content])

    def manifest(self, root: str) -> Manifest:
        """The manifest of a published weights root.

        Raises:
            OwnerError: ROLLBACK_UNAVAILABLE when it is missing or damaged.

        """
        path = self._manifest_path(root)
        try:
            manifest, _ = Manifest.parse(path, self.files.read(path))
        except (OSError, ManifestError) as error:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"manifest of {root[:12]}: {error}") from error
        if manifest.root != root:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"{path}: is the manifest of {manifest.root[:12]}")
        return manifest

    def kept_assets(self, digest: str) -> Assets:
        """The assets of a published identity.

        Raises:
            OwnerError: ROLLBACK_UNAVAILABLE when they are missing or damaged.

        """
        directory = self.assets / digest
        try:
            present = [name for name in ASSET_FILES if (directory / name).exists()]
            assets = Assets({name: self.files.read(directory / name) for name in present})
        except OSError as error:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"{directory}: {error}") from error
        if assets.digest != digest:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"{directory}: missing or damaged")
        return assets

    def _manifest_path(self, root: str) -> Path:
        return self.manifests / "by-root" / f"{root}.safetensors"


def still_there(checkpoint: Path, stamps: Mapping[str, FileStamp]) -> bool:
    """Whether a checkpoint directory still holds the very files with these stamps."""
    try:
        return bool(stamps) and all(stamp_of((checkpoint / name).stat()) == stamp for name, stamp in stamps.items())
    except OSError:
        return False
