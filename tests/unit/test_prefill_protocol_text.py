"""docs/prefill-protocol.md says what the code does: kinds, fields and offsets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rowlock.daemon.prefill.protocol import frames
from rowlock.daemon.prefill.protocol.frames import Done, Failed, Memory, Prefill, Release, Span
from rowlock.daemon.prefill.protocol.hello import _FIELDS

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "prefill-protocol.md").read_text()


def section(title: str) -> str:
    return TEXT.split(f"### {title}", 1)[1].split("\n##", 1)[0]


def rows(title: str) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in re.findall(r"^\| (\d+) \| (\d+) \|", section(title), re.MULTILINE)]


@pytest.mark.parametrize("kind", [Prefill, Release, Memory, Span, Done, Failed])
def test_the_fields_of_a_frame_are_those_of_its_table(kind: type[Prefill | Release | Memory | Span | Done]) -> None:
    title = kind.__name__.upper()
    assert re.search(rf"### {title} \(kind {kind.KIND},", TEXT)
    places = rows(title)
    sizes = [int(size or 4) for size in re.findall(r"(\d*)[QIs]", kind.FIXED.format.replace("Q", "8I"))]
    assert [size for _, size in places] == sizes
    assert [offset for offset, _ in places] == [sum(sizes[:index]) for index in range(len(sizes))]


def test_the_header_and_the_bounds_are_those_of_the_text() -> None:
    assert rows("Header") == [(0, 4), (4, 2), (6, 2), (8, 4), (12, 4)]
    assert frames.HEADER.size == 16
    for number in (frames.FRAME_MAX, frames.TOKENS_MAX, frames.TEXT_MAX):
        assert str(number) in TEXT


def test_the_fields_of_an_announcement_are_those_of_the_text() -> None:
    named = re.findall(
        r"`(\w+)`", "".join(line.split("|")[1] for line in section("HELLO").splitlines() if line[:3] == "| `")
    )
    assert set(named) == _FIELDS
