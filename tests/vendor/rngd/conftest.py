"""Tests on FuriosaAI's real packages, without a card; `make test-rngd` runs them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import write_tiny
from support.devices import DEVICES, RNGD, device_of_owners
from support.owners import OwnerHarness, running_owner
from support.rngd import SHORT, build_programs

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skipped, and said so, in a run on another device."""
    if device_of_owners() is DEVICES["rngd"]:
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="not a run on RNGD's packages: make test-rngd"))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in F32: rounding then never decides between two tokens. Never written to."""
    return write_tiny(tmp_path_factory.mktemp("rngd") / "base", dtype="F32", **SHORT)


@pytest.fixture(scope="session", autouse=True)
def programs(base: Path, tiny: Path) -> Path:
    """The directory with the programs of the tiny checkpoints, built: that takes seconds each, once per machine."""
    directory = RNGD["programs"]
    for checkpoint in (base, tiny):
        build_programs(checkpoint, directory)
    return directory


@pytest.fixture
def owner(tmp_path: Path, base: Path) -> Iterator[OwnerHarness]:
    """A running owner in reference execution."""
    with running_owner(tmp_path / "state", base) as harness:
        yield harness
