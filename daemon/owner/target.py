"""Targets: a checkpoint opened, understood and digested, ready to be planned against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from rowlock.bindings.checkpoint.assets import Assets
from rowlock.bindings.checkpoint.cache import ManifestCache
from rowlock.bindings.checkpoint.config import program_digest, tied_aliases
from rowlock.bindings.checkpoint.directory import Bytes, Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.hashing import Hasher, Progress, no_progress
from rowlock.bindings.checkpoint.header import parse_json_strictly
from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.checkpoint.stamps import FileStamp
from rowlock.bindings.model.config import ModelConfig, parse_config
from rowlock.bindings.model.layout import Layout, layout_of
from rowlock.bindings.plan import Model
from rowlock.daemon.owner.text import Text
from rowlock.v1.errors import OwnerError, Reason


class RowSource(Protocol):
    """Where staged bytes come from."""

    def read_into(self, tensor: str, offset: int, out: Bytes) -> None:
        """Copy bytes of a tensor, from its byte ``offset`` on, into ``out``."""
        ...

    def close(self) -> None: ...


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

    """

    model: Model
    config: ModelConfig
    text: Text
    source: RowSource
    stamps: Mapping[str, FileStamp]
    whole: bool = True

    def close(self) -> None:
        self.source.close()

    def as_identity(self, identity: Identity, text: Text) -> Target:
        """The same weights and program under other assets."""
        assert identity.assets == text.digest
        return replace(self, model=replace(self.model, identity=identity), text=text)


@dataclass(frozen=True)
class TargetLoader:
    """Opens checkpoint directories as targets.

    Attributes:
        place: the binding's placement of a layout.
        hasher: digests files.
        cache: manifests made before.

    """

    place: Callable[[Layout], Layout]
    hasher: Hasher
    cache: ManifestCache

    def open(self, directory: Path, progress: Progress = no_progress) -> Target:
        """Parse, check and digest a checkpoint. The caller closes the target.

        Raises:
            OwnerError: TARGET_INVALID, TARGET_NOT_FOUND or TARGET_CHANGED, with file and field.

        """
        try:
            checkpoint = Checkpoint.open(directory)
            try:
                return self._understand(checkpoint, progress)
            except BaseException:
                checkpoint.close()
                raise
        except CheckpointError as error:
            raise refusal(error) from error

    def _understand(self, checkpoint: Checkpoint, progress: Progress) -> Target:
        config = parse_config(checkpoint.directory, checkpoint.config, _generation_config(checkpoint))
        layout = self.place(layout_of(checkpoint, config))
        text = Text(checkpoint.directory, checkpoint.assets)
        manifest = self.cache.find(checkpoint)
        if manifest is None:
            manifest = self.hasher.manifest(checkpoint, tied_aliases(checkpoint.config), progress)
            self.cache.store(checkpoint, manifest)
        identity = Identity(program_digest(checkpoint.config), checkpoint.assets.digest, manifest.root)
        return Target(
            Model(identity, manifest, layout, str(checkpoint.directory)),
            config,
            text,
            checkpoint,
            checkpoint.stamps,
        )


def _generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    return generation_config(checkpoint.directory, checkpoint.assets)


def generation_config(directory: Path, assets: Assets) -> dict[str, Any]:
    """``generation_config.json``, or nothing when there is none."""
    raw = assets.files.get("generation_config.json", b"{}")
    try:
        parsed = parse_json_strictly(raw)
    except ValueError as error:
        parsed = str(error)
    if not isinstance(parsed, dict):
        raise CheckpointError(
            CheckpointFault.MALFORMED, directory / "generation_config.json", f"is not a JSON object: {parsed}"
        )
    return parsed


_REASONS = {
    CheckpointFault.NOT_FOUND: Reason.TARGET_NOT_FOUND,
    CheckpointFault.CHANGED: Reason.TARGET_CHANGED,
}


def refusal(error: CheckpointError) -> OwnerError:
    """The refusal that a bad checkpoint leads to."""
    return OwnerError(_REASONS.get(error.fault, Reason.TARGET_INVALID), f"{error} [{error.fault.value}]", error.hint)
