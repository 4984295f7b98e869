"""Putting a whole model on the device, with proof."""

from __future__ import annotations

from pathlib import Path

from rowlock.bindings.device import Runtime
from rowlock.daemon.owner.core import Core
from rowlock.daemon.owner.images import COMPARE_BYTES, Images, first_mismatch, new_images, whole_parents
from rowlock.daemon.owner.rebuild import rebuild
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.target import Target
from rowlock.daemon.owner.warmup import warm_up
from rowlock.v1.errors import OwnerError, Reason


def stage_whole(core: Core, target: Target) -> tuple[Images, int]:
    """Every byte of a target in private memory, each digest checked.

    Blocks: not for the owner thread while it serves.

    Returns:
        The images of all parents, and how many values are not finite.

    """
    manifest, layout = target.model.manifest, target.model.layout
    images = new_images(layout, layout.parents)
    wanted = {name: range(tensor.info.groups) for name, tensor in manifest.tensors.items()}
    core.stager.stage(target.source, manifest, layout, images, wanted, whole=True)
    return images, core.stager.nonfinite(images, layout)


def upload(core: Core, runtime: Runtime, images: Images) -> None:
    """Fill every allocation, and fence."""
    for name, image in images.items():
        core.binding.memory.write_rows(runtime.allocations[name], 0, image)
        core.binding.counters.uploads += 1
    core.binding.memory.fence()


def prove_upload(core: Core, runtime: Runtime, images: Images) -> None:
    """Read every allocation back. Raises OwnerError: VERIFY_MISMATCH."""
    pieces = whole_parents(runtime.allocations, images, COMPARE_BYTES)
    wrong = first_mismatch(core.binding.memory, runtime.allocations, images, pieces, core.comparer)
    if wrong is not None:
        raise OwnerError(
            Reason.VERIFY_MISMATCH, f"row {wrong[1]} of {wrong[0]} reads back other bytes than were loaded"
        )


def install(core: Core, target: Target) -> Runtime:
    """Stage, create, upload, prove, warm up; after an error nothing of it is left.

    Raises:
        CloseFailedError: something of it may be left.
        OwnerError, DeviceError: the cause.

    """
    images, _ = stage_whole(core, target)
    runtime = core.binding.create_runtime(target.config, target.model.layout)
    try:
        upload(core, runtime, images)
        prove_upload(core, runtime, images)
        warm_up(runtime, target.config, core.context.variants)
    except Exception:
        core.close_runtime(runtime)
        raise
    return runtime


def old_target(core: Core, old: Resident) -> Target:
    """The resident identity as a target, from its checkpoint, the retained assets and pushed rows.

    Raises:
        OwnerError: it does not hold that identity any more.

    """
    checkpoint = Path(old.model.checkpoint)
    return rebuild(core.stores, core.loader, old.model.identity, checkpoint, old.overlay, old.generation)
