"""What the tests of compiled graphs share: the double of rebel-compiler, and a directory of graphs for it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from support.checkpoints import write_artifact
from support.standin import DOUBLE


@pytest.fixture
def rebel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOUBLE))
    import rebel  # noqa: PLC0415 - on the path only now

    rebel.Runtime.most = 0
    return rebel


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "base", b"base")
