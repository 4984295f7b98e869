"""docs/prefill-protocol.md says what the code does: kinds, fields and offsets."""

from __future__ import annotations

import fcntl
import re
from pathlib import Path

import pytest

from rowlock.daemon.prefill.protocol import frames
from rowlock.daemon.prefill.protocol.frames import Done, Failed, Memory, Mode, Prefill, Refusal, Release, Span
from rowlock.daemon.prefill.protocol.geometry import DTYPE_CODES
from rowlock.daemon.prefill.protocol.hello import _FIELDS, LAYERS_MAX, NAME_MAX, SIZE_MAX, WIDTHS_MAX
from rowlock.daemon.prefill.protocol.memory import F_SEAL_FUTURE_WRITE, SEALS
from rowlock.daemon.prefill.settings import SourceSettings

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


def test_codes_and_limits_are_those_of_the_text() -> None:
    modes = re.search(r"mode: (.+) \|", section("PREFILL"))
    assert modes is not None
    assert modes[1] == ", ".join(f"{mode.value} {mode.name.lower()}" for mode in Mode)
    dtypes = re.search(r"dtype: (.+) \|", section("SPAN"))
    assert dtypes is not None
    assert dtypes[1] == ", ".join(f"{code} {name}" for name, code in DTYPE_CODES.items())
    reasons = re.search(r"reason: (.+) \|", section("FAILED"))
    assert reasons is not None
    words = {
        "MEMORY": "not enough memory",
        "WIDTH": "wider than every program",
        "IDENTITY": "another identity",
        "COMPUTE": "the device failed",
        "ARGUMENT": "a field",
    }
    assert reasons[1] == ", ".join(f"{refusal.value} {words[refusal.name]}" for refusal in Refusal)
    hello = section("HELLO")
    for number in (LAYERS_MAX, frames.GROUPS_MAX, NAME_MAX, WIDTHS_MAX, SIZE_MAX):
        assert re.search(rf"\b{number}\b", hello), number
    assert f"1 to {frames.GROUPS_MAX}" in section("PREFILL")
    seals = {
        "F_SEAL_SHRINK": fcntl.F_SEAL_SHRINK,
        "F_SEAL_GROW": fcntl.F_SEAL_GROW,
        "F_SEAL_FUTURE_WRITE": F_SEAL_FUTURE_WRITE,
        "F_SEAL_SEAL": fcntl.F_SEAL_SEAL,
    }
    assert set(re.findall(r"F_SEAL_\w+", section("MEMORY"))) == set(seals)
    assert sum(seals.values()) == SEALS


def test_the_arguments_of_a_source_are_those_of_the_text() -> None:
    command = SourceSettings(extra={"a": "b"}).command(Path("/models/x"), 7, 8)
    start = TEXT.split("```", 2)[1]
    assert re.findall(r"--[\w-]+", start) == [part for part in command if part.startswith("--")]
    assert command[1:4] == ["-m", "rowlock.cli", "prefill-worker"]
