"""Targets: a checkpoint opened, understood and digested, ready to be planned against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from rowlock.bindings.checkpoint.artifacts import ArtifactDirectory
from rowlock.bindings.checkpoint.cache import ManifestCache
from rowlock.bindings.checkpoint.config import program_digest, tied_aliases
from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.hashing import Hasher, Progress, no_progress
from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.checkpoint.manifest import Manifest
from rowlock.bindings.checkpoint.stamps import FileStamp
from rowlock.bindings.device import DeviceError
from rowlock.bindings.model.config import ModelConfig, parse_config
from rowlock.bindings.model.layout import Layout, layout_of
from rowlock.bindings.plan import Model
from rowlock.daemon.owner.sources import RowSource
from rowlock.daemon.owner.text import Text, Texts
from rowlock.v1.errors import OwnerError, Reason


@dataclass(frozen=True)
class Target:
    """Everything that a transition needs to know of where it goes.

    Attributes:
        model: identity, manifest, layout.
        config: sizes.
        text: tokenizer and friends.
        source: where its bytes are read.
        stamps: of the checkpoint's weight files when they were digested.
        whole: the source has every tensor, not only the changed groups.
        overlay: file of pushed rows that lie over the checkpoint, or empty.
        pushed: content of that file: groups by (tensor, group).

    """

    model: Model
    config: ModelConfig
    text: Text
    source: RowSource
    stamps: Mapping[str, FileStamp]
    whole: bool = True
    overlay: str = ""
    pushed: Mapping[tuple[str, int], memoryview] = field(default_factory=dict)

    def close(self) -> None:
        self.source.close()


@dataclass(frozen=True)
class TargetLoader:
    """Opens checkpoint directories as targets.

    Attributes:
        place: the binding's placement of a layout.
        hasher: digests files.
        cache: manifests made before.
        roots: if not empty, targets must really lie below one of them.
        log: told when a manifest could not be cached.
        artifacts: the device runs compiled graphs.
        give_way: called between pieces of a few ms, which hold the interpreter's lock: those who decode want it too.
        texts: those in use.

    """

    place: Callable[[Layout], Layout]
    hasher: Hasher
    cache: ManifestCache
    roots: tuple[Path, ...] = ()
    log: Callable[..., None] = lambda *_args, **_fields: None
    artifacts: bool = False
    give_way: Callable[[], None] = lambda: None
    texts: Texts = field(default_factory=Texts)

    def open(self, directory: Path, progress: Progress = no_progress) -> Target:
        """Parse, check and digest a checkpoint. The caller closes the target.

        Args:
            directory: absolute.
            progress: told of bytes digested.

        Raises:
            OwnerError: TARGET_INVALID, TARGET_NOT_FOUND or TARGET_CHANGED, with file and field.
                Nothing else, whatever the files hold.

        """
        try:
            graphs = ArtifactDirectory.find(directory, self.roots)
            if graphs is not None:
                return self._understand_graphs(graphs)
            self.give_way()
            checkpoint = Checkpoint.open(directory, self.roots)
            try:
                self.give_way()
                return self._understand(checkpoint, progress)
            except BaseException:
                checkpoint.close()
                raise
        except CheckpointError as error:
            raise refusal(error) from error
        except DeviceError as error:
            raise OwnerError(Reason.TARGET_INVALID, f"{directory}: {error}") from error
        except OwnerError:
            raise
        except Exception as error:
            self.log("target.unexpected_error", directory=str(directory), error=repr(error), exc_info=error)
            raise OwnerError(Reason.TARGET_INVALID, f"{directory}: {type(error).__name__}: {error}") from error

    def _understand(self, checkpoint: Checkpoint, progress: Progress) -> Target:
        config = parse_config(checkpoint.directory, checkpoint.config)
        layout = self.place(layout_of(checkpoint, config))
        text = self.texts.of(checkpoint.directory, checkpoint.assets, checkpoint.config)
        self.give_way()
        manifest = self.cache.find(checkpoint)
        if manifest is None:
            manifest = self.hasher.manifest(checkpoint, tied_aliases(checkpoint.config), progress)
            self._keep(checkpoint, manifest)
        assert manifest.tensors.keys() == layout.placements.keys()
        identity = Identity(program_digest(checkpoint.config), checkpoint.assets.digest, manifest.root)
        model = Model(identity, manifest, layout, str(checkpoint.directory))
        return Target(model, config, text, checkpoint, checkpoint.stamps)

    def _understand_graphs(self, found: ArtifactDirectory) -> Target:
        """Compiled graphs: no tensors of their own; the program digest covers every byte of them."""
        try:
            if not self.artifacts:
                raise OwnerError(
                    Reason.TARGET_INVALID, f"{found.directory}: holds graphs compiled for ATOM, not for this device"
                )
            config = parse_config(found.directory, found.config)
            config = replace(config, context=min(config.context, found.artifact.context))
            layout = self.place(Layout({}, {}, found.artifact))
            manifest = Manifest.of(())
            identity = Identity(found.artifact.program(found.config), found.assets.digest, manifest.root)
            model = Model(identity, manifest, layout, str(found.directory))
            text = self.texts.of(found.directory, found.assets, found.config)
            return Target(model, config, text, found, found.stamps)
        except BaseException:
            found.close()
            raise

    def _keep(self, checkpoint: Checkpoint, manifest: Manifest) -> None:
        try:
            self.cache.store(checkpoint, manifest)
        except OSError as error:  # it only saves time
            self.log("manifest.not_cached", directory=str(checkpoint.directory), error=str(error))


_REASONS = {
    CheckpointFault.NOT_FOUND: Reason.TARGET_NOT_FOUND,
    CheckpointFault.CHANGED: Reason.TARGET_CHANGED,
}


def refusal(error: CheckpointError) -> OwnerError:
    """The refusal that a bad checkpoint leads to."""
    return OwnerError(_REASONS.get(error.fault, Reason.TARGET_INVALID), f"{error} [{error.fault.value}]", error.hint)
