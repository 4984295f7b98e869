"""Putting a whole model on the device, with proof."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rowlock.bindings.device import DeviceError, DeviceFault, Runtime, Variant
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout
from rowlock.daemon.owner.core import Core
from rowlock.daemon.owner.images import Images, first_mismatch, whole_parents
from rowlock.daemon.owner.rebuild import rebuild
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.staging import Staging
from rowlock.daemon.owner.target import Target
from rowlock.daemon.owner.warmup import refuse_variant, warm_up
from rowlock.v1.errors import OwnerError, Reason


def stage_whole(staging: Staging, target: Target) -> tuple[Images, int]:
    """Every byte of a target in private memory, each digest checked.

    Blocks: not for the owner thread while it serves.

    Returns:
        The images of all parents, and how many values are not finite.

    """
    manifest, layout = target.model.manifest, target.model.layout
    images = staging.new_images(layout, layout.parents)
    wanted = {name: range(tensor.info.groups) for name, tensor in manifest.tensors.items()}
    staging.stage(target.source, manifest, layout, images, wanted, whole=True)
    found = staging.nonfinite(images, layout)
    staging.at_hand(images)
    return images, found


def prepare(core: Core, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...]) -> None:
    """Make what a runtime of a model will need for these shapes, without touching the device; until the owner stops.

    Blocks: not for the owner thread while it serves.

    Raises:
        OwnerError: CONTEXT_EXCEEDED, CACHE_EXCEEDED or ARGUMENT_INVALID, naming the variant that could never run.
        DeviceError: UNSUPPORTED, OUT_OF_MEMORY: a runtime could not be created.

    """
    facts = core.binding.facts
    for variant in variants:
        refuse_variant(facts.device, facts.batch_max, config, variant)
    try:
        core.binding.prepare(config, layout, variants, core.is_stopping)
    except DeviceError as error:
        if error.fault is not DeviceFault.CAPACITY:
            raise
        raise OwnerError(Reason.CACHE_EXCEEDED, str(error)) from error


def create(core: Core, target: Target) -> Runtime:
    """The runtime of a target that was prepared, content undefined; after an error nothing of it is left."""
    return core.binding.create_runtime(target.config, target.model.layout, core.context.variants)


def warm(core: Core, runtime: Runtime, config: ModelConfig, cancelled: Callable[[], bool]) -> None:
    """Run a new runtime in its shapes, if the owner is to. See :func:`rowlock.daemon.owner.warmup.warm_up`."""
    if core.context.warmup:
        warm_up(runtime, config, core.context.variants, cancelled)


def upload(core: Core, runtime: Runtime, images: Images) -> None:
    """Fill every allocation, and fence. Raises FenceFailedError: what it has started may still run."""
    for name, image in images.items():
        core.binding.memory.write_rows(runtime.allocations[name], 0, image)
        core.binding.counters.uploads += 1
    core.fence_load()


def prove_upload(core: Core, runtime: Runtime, images: Images) -> None:
    """Read every allocation back. Raises OwnerError: VERIFY_MISMATCH."""
    pieces = whole_parents(runtime.allocations, images, core.comparer.piece_bytes)
    wrong = first_mismatch(core.binding.memory, runtime.allocations, images, pieces, core.comparer)
    if wrong is not None:
        raise OwnerError(
            Reason.VERIFY_MISMATCH, f"row {wrong[1]} of {wrong[0]} reads back other bytes than were loaded"
        )


def install(core: Core, target: Target, cancelled: Callable[[], bool]) -> Runtime:
    """Stage, create, upload, prove, warm up; after an error nothing of it is left, or the owner is quarantined.

    Args:
        core: the owner's.
        target: whole.
        cancelled: looked at between the steps of the warmup.

    Raises:
        OwnerError, DeviceError, FenceFailedError, CancelledError: what went wrong first. A failed close of what was
            begun is its ``__cause__``.

    """
    prepare(core, target.config, target.model.layout, core.context.variants)
    staging = core.context.new_staging(target.model.manifest.nbytes)
    try:
        images, _ = stage_whole(staging, target)
    finally:
        staging.close()
    runtime = create(core, target)
    try:
        upload(core, runtime, images)
        prove_upload(core, runtime, images)
        warm(core, runtime, target.config, cancelled)
    except Exception as error:  # noqa: BLE001 - raised again below, where a failed close has not this one as its context
        cause = error
    else:
        return runtime
    core.discard(runtime, images, cause)
    raise cause


def old_target(core: Core, old: Resident) -> Target:
    """The resident identity as a target, from its checkpoint, the retained assets and pushed rows.

    Raises:
        OwnerError: it does not hold that identity any more.

    """
    checkpoint = Path(old.model.checkpoint)
    return rebuild(core.stores, core.loader, old.model.identity, checkpoint, old.overlay, old.generation)
