"""Every planted bug still fits the sources: `make planted` shows that each is caught."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from planted.bugs import Bug, bugs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("bug", bugs(), ids=[bug.name for bug in bugs()])
def test_it_can_be_planted(bug: Bug, tmp_path: Path) -> None:
    copy = tmp_path / bug.file
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / bug.file, copy)
    bug.plant(tmp_path)
    assert copy.read_text() != (ROOT / bug.file).read_text()
    ast.parse(copy.read_text())


def test_the_docs_name_who_caught_each() -> None:
    page = (ROOT / "docs" / "planted.md").read_text()
    for bug in bugs():
        assert f"| {bug.name} |" in page, f"{bug.name}: make planted PLANTED=--write"
