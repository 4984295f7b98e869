"""Faults of the runtime library that only ATOM has, through a whole owner. The others are in the transition suite."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.devices import DEVICES, device_of_owners
from support.owners import OwnerHarness

from rowlock.bindings.plan import Require
from rowlock.daemon.owner.states import OwnerState

pytestmark = pytest.mark.skipif(
    device_of_owners() is not DEVICES["atom"], reason="ATOM: run `make test-atom`, which has torch-rbln"
)


@pytest.fixture
def target(tiny: Path, tmp_path: Path) -> Path:
    return change_rows(tiny, tmp_path / "target", EMBED, [5, 6, 200], negate)


@pytest.mark.parametrize("fence", [0, 1], ids=["before the writes", "after the writes"])
def test_a_synchronise_that_fails_is_undone(owner: OwnerHarness, target: Path, fault_file: Path, fence: int) -> None:
    answer, identity = owner.tokens(), owner.identity
    fault_file.write_text(json.dumps({"operation": "fence", "effect": "error", "skip": fence}))
    record = owner.transition(target)
    assert (record.state, record.reason, record.readback) == ("ROLLED_BACK", "DEVICE_FAILED", "unproven")
    assert not fault_file.exists()
    assert (owner.identity, owner.tokens()) == (identity, answer)
    assert owner.verify().ok
    assert owner.transition(target).state == "PUBLISHED"


def test_a_free_that_fails_quarantines(owner: OwnerHarness, target: Path, fault_file: Path) -> None:
    """torch-rbln only warns of it: but what is live on the device is not known then, and nothing may replace it."""
    fault_file.write_text(json.dumps({"operation": "release", "effect": "error"}))
    record = owner.transition(target, Require.B1)
    assert record.state == "QUARANTINED"
    assert "still counts" in record.message
    assert owner.owner.view.state is OwnerState.QUARANTINED


def test_what_is_computed_is_what_the_device_holds(owner: OwnerHarness) -> None:
    """The programs' copies are read again after a write, even one that the owner knows nothing of."""
    before = owner.tokens()
    owner.stray_write("norm", 0)
    changed = [owner.core.binding.counters.bytes_read_back]
    owner.tokens()
    changed.append(owner.core.binding.counters.bytes_read_back)
    norm = owner.owner.view.resident.model.layout.parents["norm"].nbytes  # type: ignore[union-attr]
    assert changed[1] - changed[0] == norm, "the written allocation, and no other, is read again"
    owner.stray_write("norm", 0)
    assert owner.tokens() == before
