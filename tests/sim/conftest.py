from __future__ import annotations

import pytest

from sim.scenarios import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The checkpoints of simulations, and what is true of them."""
    return World.make(tmp_path_factory.mktemp("sim") / "models")
