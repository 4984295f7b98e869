"""Programs made before an owner needs them: on any machine with the device's environment, card or no card."""

from __future__ import annotations

from pathlib import Path

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.device import BuiltPrograms, Variant
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import layout_of
from rowlock.daemon.devices import select_device
from rowlock.daemon.owner.warmup import refuse_variant
from rowlock.daemon.settings import Settings


def make_ahead(settings: Settings, checkpoint: Path, variants: tuple[Variant, ...]) -> BuiltPrograms | None:
    """Build what an owner with these settings will load with a checkpoint.

    Args:
        settings: of the owner; its device need not be there.
        checkpoint: of which config and shapes count, and no weight.
        variants: to be ready for; empty: those that any request can be computed with.

    Returns:
        None where this kind of device has nothing to build.

    Raises:
        DeviceRefusedError: this is not the environment of the device.
        CheckpointError: the checkpoint cannot be read or understood.
        OwnerError: CONTEXT_EXCEEDED or ARGUMENT_INVALID, naming the variant.
        DeviceError: a program cannot be built.

    """
    kind, _ = select_device(settings.device)
    if kind.make_ahead is None:
        return None
    with Checkpoint.open(checkpoint, settings.target_roots) as opened:
        config = parse_config(checkpoint, opened.config)
        layout = layout_of(opened, config)
    for variant in variants:
        refuse_variant(settings.device, kind.batch_max, config, variant)
    return kind.make_ahead(settings, config, layout, variants)
