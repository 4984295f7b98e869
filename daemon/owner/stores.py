"""The state directory, less the journal: undo files, pushed rows, manifests and assets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from rowlock.bindings.checkpoint.assets import ASSET_FILES, Assets
from rowlock.bindings.checkpoint.cache import ManifestCache
from rowlock.bindings.checkpoint.manifest import Manifest, ManifestError
from rowlock.bindings.checkpoint.stamps import FileStamp, stamp_of
from rowlock.bindings.plan import Model
from rowlock.daemon.owner.retention import Retention
from rowlock.journal.files import PARTIAL_SUFFIX, RESERVED_SUFFIX, Files
from rowlock.journal.undo import UndoFiles
from rowlock.v1.errors import OwnerError, Reason

MANIFESTS_CACHED: Final = 64
"""Checkpoint directories whose manifests are kept, the newest ones."""

MANIFEST_SUFFIX: Final = ".safetensors"


@dataclass(frozen=True)
class Stores:
    """Content kept so that an owner does not depend on checkpoints staying as they are.

    Attributes:
        undo: before-images by transition.
        pushed: rows that came over the wire, by overlay name.
        manifests: directory of manifests by weights root.
        assets: directory of assets by digest.
        retention: how much of the past is kept.

    """

    files: Files
    undo: UndoFiles
    pushed: UndoFiles
    manifests: Path
    assets: Path
    retention: Retention = field(default_factory=Retention)

    @classmethod
    def under(cls, directory: Path, files: Files, retention: Retention | None = None) -> Self:
        return cls(
            files,
            UndoFiles(directory / "undo", files),
            UndoFiles(directory / "pushed", files),
            directory / "manifests",
            directory / "assets",
            retention or Retention(),
        )

    def cache(self) -> ManifestCache:
        """Manifests of checkpoint directories, by path."""
        return ManifestCache(
            self.manifests / "by-path", self.files.read, lambda path, data: self.files.write(path, [data])
        )

    def keep(self, model: Model, assets: Assets) -> None:
        """Make manifest and assets of an identity durable, before it can be published."""
        path = self._manifest_path(model.manifest.root)
        if not self.files.exists(path):
            self.files.write(path, [model.manifest.serialise()])
        directory = self.assets / assets.digest
        for name, content in assets.files.items():
            if not self.files.exists(directory / name):
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
            present = [name for name in ASSET_FILES if self.files.exists(directory / name)]
            assets = Assets({name: self.files.read(directory / name) for name in present})
        except OSError as error:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"{directory}: {error}") from error
        if assets.digest != digest:
            raise OwnerError(Reason.ROLLBACK_UNAVAILABLE, f"{directory}: missing or damaged")
        return assets

    def clear_unfinished(self) -> None:
        """Remove what a killed process was still writing, and make durable what it had just named.

        Before anything is written.
        """
        by_digest = [self.assets / name for name in self.files.names(self.assets)]
        for directory in (self.undo.directory, self.pushed.directory, *self._manifest_directories, *by_digest):
            self._clear_unfinished(directory)
        for directory in (self.assets, self.manifests, self.manifests.parent):
            self.files.keep_names(directory)

    def sweep(self, roots: set[str], assets: set[str]) -> None:
        """Remove the manifests and assets of other identities, and the oldest manifests by path."""
        by_path, by_root = self._manifest_directories
        for name in self.files.names(by_root):
            if name.removesuffix(MANIFEST_SUFFIX) not in roots:
                self.files.discard(by_root / name)
        for name in self.files.names(self.assets):
            if name not in assets:
                self.files.discard(self.assets / name)
        cached = [name for name in self.files.names(by_path) if name.endswith(MANIFEST_SUFFIX)]
        for name in cached[:-MANIFESTS_CACHED]:
            self.files.discard(by_path / name)

    @property
    def _manifest_directories(self) -> tuple[Path, Path]:
        return self.manifests / "by-path", self.manifests / "by-root"

    def _clear_unfinished(self, directory: Path) -> None:
        for name in self.files.names(directory):
            if name.endswith((PARTIAL_SUFFIX, RESERVED_SUFFIX)):
                self.files.discard(directory / name)
        self.files.keep_names(directory)

    def _manifest_path(self, root: str) -> Path:
        return self.manifests / "by-root" / f"{root}{MANIFEST_SUFFIX}"


def still_there(checkpoint: Path, stamps: Mapping[str, FileStamp]) -> bool:
    """Whether a checkpoint directory still holds the very files with these stamps."""
    try:
        return bool(stamps) and all(stamp_of((checkpoint / name).stat()) == stamp for name, stamp in stamps.items())
    except OSError:
        return False
