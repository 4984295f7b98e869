"""A source that does not compute what is resident is refused, and the field is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import GEMMA3

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import build_layout
from rowlock.daemon.prefill.engine import DEFAULT_WIDTHS, widths_within
from rowlock.daemon.prefill.fitting import check_fit, geometry_of
from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.daemon.prefill.protocol.hello import SourceFacts

CONFIG = parse_config(Path(), GEMMA3)
LAYOUT = build_layout(CONFIG, "BF16")
IDENTITY = Identity("11" * 32, "22" * 32, "33" * 32)
GEOMETRY = geometry_of(CONFIG, LAYOUT)
FACTS = SourceFacts(
    "a source", bytes.fromhex(IDENTITY.program), bytes.fromhex(IDENTITY.weights), GEOMETRY, CONFIG.heads, (64,), True,
    False,
)  # fmt: skip
OTHER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "program": ({"program": b"x" * 32}, {}, f"is {'78' * 32}; wanted: {IDENTITY.program}"),
    "weights": ({"weights": b"x" * 32}, {}, f"is {'78' * 32}; wanted: {IDENTITY.weights}"),
    "dtype": ({}, {"dtype": "F32"}, "is F32; wanted: BF16"),
    "layers": ({}, {"windows": (16, None)}, "is 2; wanted: 3"),
    "windows": ({}, {"windows": (16, 16, 16)}, r"is \(16, 16, 16\); wanted: \(16, None, 16\)"),
    "heads": ({"heads": 8}, {}, "is 8; wanted: 4"),
    "kv_heads": ({}, {"kv_heads": 2}, "is 2; wanted: 1"),
    "head_dim": ({}, {"head_dim": 16}, "is 16; wanted: 32"),
    "vocab": ({}, {"vocab": 261}, "is 261; wanted: 260"),
    "recurrent": ({"recurrent": True}, {}, "is True; wanted: False"),
    "streams": ({"streams": False}, {}, "is False; wanted: True"),
}


@pytest.mark.parametrize("field", OTHER)
def test_each_field_of_an_announcement_decides(field: str) -> None:
    facts, geometry, words = OTHER[field]
    other = replace(FACTS, **{"geometry": replace(GEOMETRY, **geometry), **facts})
    with pytest.raises(ValueError, match=rf"hello\.{field} {words}"):
        check_fit(other, IDENTITY, CONFIG, LAYOUT, Mode.STREAM)


def test_a_source_that_fits_is_taken_and_need_not_stream_whole_results() -> None:
    check_fit(FACTS, IDENTITY, CONFIG, LAYOUT, Mode.STREAM)
    check_fit(replace(FACTS, streams=False), IDENTITY, CONFIG, LAYOUT, Mode.WHOLE)


def test_widths_are_prepared_up_to_the_context_and_for_all_of_it() -> None:
    assert DEFAULT_WIDTHS == (128, 512, 2048, 8192)
    found = {context: widths_within(context, DEFAULT_WIDTHS) for context in (64, 512, 4096, 8192, 32768)}
    assert found == {
        64: (64,), 512: (128, 512), 4096: (128, 512, 2048, 4096), 8192: DEFAULT_WIDTHS, 32768: DEFAULT_WIDTHS,
    }  # fmt: skip
