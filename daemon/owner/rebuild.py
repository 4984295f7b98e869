"""A published identity as a target again: from its checkpoint, and what the state directory keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rowlock.bindings.checkpoint.errors import CheckpointError
from rowlock.bindings.checkpoint.identity import Identity
from rowlock.daemon.owner.sources import OverlaySource
from rowlock.daemon.owner.stores import Stores
from rowlock.daemon.owner.target import Target, TargetLoader, refusal
from rowlock.daemon.owner.text import Text, Texts
from rowlock.journal.undo import UndoError
from rowlock.v1.errors import OwnerError, Reason


def rebuild(
    stores: Stores, loader: TargetLoader, wanted: Identity, checkpoint: Path, overlay: str, generation: int
) -> Target:
    """The target that an identity was, whole, so that it can be loaded again.

    Weights that were pushed lie over those of the checkpoint; assets that have changed on
    disk come from the state directory. Every byte is still checked when it is staged.

    Args:
        stores: retained manifests, assets and pushed rows.
        loader: opens the checkpoint.
        wanted: the identity.
        checkpoint: the directory it was published from.
        overlay: file of pushed rows, or empty.
        generation: for messages.

    Raises:
        OwnerError: TARGET_CHANGED or another refusal, when it cannot be had any more.

    """
    target = loader.open(checkpoint)
    try:
        if overlay:
            target = _overlaid(stores, target, wanted, overlay)
        found = target.model.identity
        if (found.program, found.weights) != (wanted.program, wanted.weights):
            raise OwnerError(Reason.TARGET_CHANGED, f"{checkpoint}: does not hold generation {generation} any more")
        return target if found == wanted else _with_assets(stores, loader.texts, target, wanted)
    except BaseException:
        target.close()
        raise


def kept_text(stores: Stores, texts: Texts, assets: str, config: dict[str, object]) -> Text:
    """Tokenizer and stop tokens of a published identity. Raises OwnerError."""
    try:
        return texts.of(stores.assets / assets, stores.kept_assets(assets), config)
    except CheckpointError as error:
        raise refusal(error) from error


def _overlaid(stores: Stores, target: Target, wanted: Identity, overlay: str) -> Target:
    manifest = stores.manifest(wanted.weights)
    tensors = {name: tensor.info for name, tensor in manifest.tensors.items()}
    if tensors != {name: tensor.info for name, tensor in target.model.manifest.tensors.items()}:
        raise OwnerError(Reason.TARGET_CHANGED, f"{target.model.checkpoint}: holds other tensors than before")
    try:
        pushed = stores.pushed.read(overlay)
    except UndoError as error:
        raise OwnerError(Reason.TARGET_CHANGED, f"pushed rows: {error}") from error
    identity = replace(target.model.identity, weights=manifest.root)
    return replace(
        target,
        model=replace(target.model, identity=identity, manifest=manifest),
        source=OverlaySource(target.source, tensors, pushed),
        overlay=overlay,
        pushed=pushed,
    )


def _with_assets(stores: Stores, texts: Texts, target: Target, wanted: Identity) -> Target:
    text = kept_text(stores, texts, wanted.assets, target.text.config)
    return replace(target, model=replace(target.model, identity=wanted), text=text)
