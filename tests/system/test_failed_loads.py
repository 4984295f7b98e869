"""A load that fails: what it began is closed, what went wrong first is told, and nothing unproven is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.owners import OwnerHarness, running_owner

from rowlock.bindings.device import DeviceError, DeviceFault, Variant
from rowlock.bindings.plan import Require
from rowlock.daemon.owner.core import CloseFailedError, FenceFailedError
from rowlock.daemon.owner.states import OwnerState, TransitionState

WARM = {"variants": (Variant(2, 40),), "warmup": True}
CALLS = ("fence", "write_rows", "read_rows", "allocate", "release")


def failing(name: str) -> Callable[..., None]:
    def fail(*_arguments: object) -> None:
        raise DeviceError(DeviceFault.LOST, f"injected: {name}")

    return fail


def break_warmup(owner: OwnerHarness) -> None:
    """The first step of every runtime fails."""
    binding = owner.core.binding._inner
    create = binding.create_runtime

    def created(*arguments):  # type: ignore[no-untyped-def]
        runtime = create(*arguments)
        runtime.advance = failing("advance")
        return runtime

    binding.create_runtime = created


def break_warmup_and_close(owner: OwnerHarness) -> None:
    break_warmup(owner)
    owner.core.binding.memory._inner.release = failing("release")


def break_fence(owner: OwnerHarness) -> None:
    """The first fence fails; ``memory.after`` says what is done with the device from then on."""
    memory = owner.core.binding.memory._inner
    memory.after = []

    def fence() -> None:
        for name in CALLS:
            setattr(memory, name, lambda *_arguments, name=name: memory.after.append(name))
        failing("fence")()

    memory.fence = fence


def memory_of(owner: OwnerHarness):  # type: ignore[no-untyped-def]
    return owner.core.binding.memory._inner


@pytest.fixture(params=["a first load", "a restart"])
def state(request: pytest.FixtureRequest, tmp_path: Path, tiny: Path) -> Path:
    """Of an owner that has never loaded anything, and of one that has."""
    if request.param == "a restart":
        with running_owner(tmp_path / "state", tiny) as owner:
            assert owner.owner.view.state is OwnerState.READY
    return tmp_path / "state"


def test_a_failed_warmup_leaves_nothing_and_says_what_it_was(state: Path, tiny: Path) -> None:
    with running_owner(state, tiny, plant=break_warmup, **WARM) as owner:
        assert owner.owner.view.state is OwnerState.EMPTY
        assert "injected: advance" in owner.owner.view.reason
        assert memory_of(owner)._live == {}
    with running_owner(state, tiny, **WARM) as owner:
        assert owner.owner.view.state is OwnerState.READY


def test_a_failed_close_comes_behind_what_went_wrong_first(state: Path, tiny: Path) -> None:
    with running_owner(state, tiny, plant=break_warmup_and_close, **WARM) as owner:
        view = owner.owner.view
        assert view.state is OwnerState.QUARANTINED
        assert view.quarantined.index("injected: advance") < view.quarantined.index("injected: release")
        assert memory_of(owner)._live, "what could not be closed is kept"
        assert owner.core.abandoned


def test_a_failed_first_load_raises_its_own_error_with_the_failed_close_as_its_cause(
    tmp_path: Path, tiny: Path
) -> None:
    with running_owner(tmp_path / "state", tiny, plant=break_warmup_and_close, **WARM) as owner:
        error = owner.load_failure
        assert isinstance(error, DeviceError)
        assert str(error) == "injected: advance"
        assert isinstance(error.__cause__, CloseFailedError)
        assert "injected: release" in str(error.__cause__)
        seen, link = [], error.__cause__
        while link is not None:
            assert link not in [error, *seen], "the chain has an end"
            seen.append(link)
            link = link.__cause__ or link.__context__


def test_a_fence_that_fails_is_the_last_thing_that_the_device_is_asked(state: Path, tiny: Path) -> None:
    with running_owner(state, tiny, plant=break_fence, **WARM) as owner:
        memory, view = memory_of(owner), owner.owner.view
        assert view.state is OwnerState.QUARANTINED
        assert view.quarantined == "a fence failed: injected: fence"
        assert memory.after == []
        kept = [item for item in owner.core.abandoned if isinstance(item, tuple) or getattr(item, "images", None)]
        assert kept, "what was being copied from is still there"


def test_a_fence_that_fails_in_a_reload_closes_nothing(tmp_path: Path, tiny: Path) -> None:
    target = change_rows(tiny, tmp_path / "target", EMBED, [5], negate)
    with running_owner(tmp_path / "state", tiny) as owner:
        live = set(memory_of(owner)._live)
        break_fence(owner)
        record = owner.transition(target, Require.B1)
        assert (record.state, record.reason) == (TransitionState.QUARANTINED.value, "DEVICE_FAILED")
        assert memory_of(owner).after == []
        assert set(memory_of(owner)._live) == live
        (transit,) = [item for item in owner.core.abandoned if hasattr(item, "images")]
        assert transit.images


def test_a_fence_that_fails_after_the_upload_of_a_reload_keeps_the_images(tmp_path: Path, tiny: Path) -> None:
    target = change_rows(tiny, tmp_path / "target", EMBED, [5], negate)
    with running_owner(tmp_path / "state", tiny) as owner:
        create = owner.core.binding._inner.create_runtime

        def created(*arguments):  # type: ignore[no-untyped-def]
            runtime = create(*arguments)
            break_fence(owner)
            return runtime

        owner.core.binding._inner.create_runtime = created
        record = owner.transition(target, Require.B1)
        assert record.state == TransitionState.QUARANTINED.value
        assert memory_of(owner).after == []
        (transit,) = [item for item in owner.core.abandoned if hasattr(item, "images")]
        assert transit.images
        assert transit.runtime is not None
        assert isinstance(transit.failure, FenceFailedError)


def test_a_restoration_that_cannot_be_closed_quarantines_with_the_first_error_on_record(
    tmp_path: Path, tiny: Path
) -> None:
    """The new model fails in its warmup, and so does the old one, which then cannot be closed."""
    target = change_rows(tiny, tmp_path / "target", EMBED, [5], negate)
    with running_owner(tmp_path / "state", tiny, **WARM) as owner:
        break_warmup(owner)
        binding, runtimes = owner.core.binding._inner, []
        create = binding.create_runtime

        def created(*arguments):  # type: ignore[no-untyped-def]
            runtimes.append(create(*arguments))
            if len(runtimes) == 2:
                memory_of(owner).release = failing("release")
            return runtimes[-1]

        binding.create_runtime = created
        record = owner.transition(target, Require.B1)
        assert (record.state, record.message) == (TransitionState.QUARANTINED.value, "injected: advance")
        assert "injected: release" in owner.owner.view.quarantined
        assert runtimes[1] in [getattr(item, "_inner", None) for item in owner.core.abandoned]
