"""A test that the docs name is there, and so is every file of tests: what they claim can be run again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTS = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_test_that_is_named_is_there(page: Path) -> None:
    there = {name for text in TESTS.values() for name in re.findall(r"def (test_\w+)\(", text)}
    there |= {path.stem for path in TESTS}
    named = set(re.findall(r"`(?:[^`]*\W)?(test_\w+)", page.read_text()))
    assert named <= there, f"{page.name} names tests that are not there: {sorted(named - there)}"


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_choice_of_tests_chooses_some(page: Path) -> None:
    """``pytest -k "this or that"``: each word is part of the name of a test."""
    names = " ".join(name for text in TESTS.values() for name in re.findall(r"def (test_\w+)\(", text))
    for chosen in re.findall(r'pytest -k "([^"]+)"', page.read_text()):
        for word in chosen.split(" or "):
            assert word in names or word.isupper(), f"{page.name}: no test has {word!r} in its name"
