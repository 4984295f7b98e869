"""Frames: what was packed is parsed again, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.prefill import FACTS

from rowlock.daemon.prefill.protocol.frames import (
    FRAME_MAX,
    HEADER,
    MAGIC,
    TEXT_MAX,
    TOKENS_MAX,
    VERSION,
    Done,
    Failed,
    Frame,
    FrameError,
    FrameFault,
    Hello,
    Memory,
    Mode,
    Prefill,
    Refusal,
    Release,
    Span,
    pack,
    parse,
)
from rowlock.daemon.prefill.protocol.hello import hello_of, parse_hello

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
DIGEST = st.binary(min_size=32, max_size=32)
TOKENS = st.lists(U32, min_size=1, max_size=40).map(tuple)
FRAMES: st.SearchStrategy[Frame] = st.one_of(
    st.builds(Hello, st.text(max_size=200)),
    st.builds(
        Prefill, U64, U64, DIGEST, DIGEST, st.sampled_from(Mode), st.integers(1, 99), U32,
        st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple), TOKENS,
    ),
    st.builds(Release, U64, U64),
    st.builds(Memory, U64, U64, U64),
    st.builds(
        Span, U64, U64, st.integers(0, 5), st.integers(6, 9), st.integers(0, 5), st.integers(6, 9),
        st.integers(1, 3), U32, U32, U64,
    ),
    st.builds(Done, U64, U64, U32, U32, U32, U64),
    st.builds(Failed, U64, U64, st.sampled_from(Refusal), st.text(max_size=100)),
)  # fmt: skip
SPAN = Span(1, 2, 0, 1, 0, 4, 1, 2, 8, 99)


@given(FRAMES)
def test_a_frame_comes_back_as_it_was(frame: Frame) -> None:
    assert parse(pack(frame)) == frame


@given(st.binary(max_size=300))
@example(b"")
@example(MAGIC)
def test_any_bytes_are_a_frame_or_an_error(data: bytes) -> None:
    for packet in (data, HEADER.pack(MAGIC, VERSION, data[0] % 24 if data else 0, len(data), 0) + data):
        try:
            frame = parse(packet)
        except FrameError:
            continue
        assert pack(frame) == packet


@given(FRAMES, st.data())
def test_a_frame_that_is_cut_or_lengthened_is_refused(frame: Frame, data: st.DataObject) -> None:
    packet = pack(frame)
    cut = data.draw(st.integers(0, len(packet) - 1))
    with pytest.raises(FrameError) as caught:
        parse(packet[:cut])
    assert caught.value.fault is FrameFault.TRUNCATED
    with pytest.raises(FrameError):
        parse(packet + b"\0")


@given(FRAMES, st.data())
def test_a_frame_with_a_changed_byte_is_another_frame_or_an_error(frame: Frame, data: st.DataObject) -> None:
    packet = bytearray(pack(frame))
    packet[data.draw(st.integers(0, len(packet) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        assert pack(parse(bytes(packet))) == bytes(packet)
    except FrameError:
        return


def _with(packet: bytes, offset: int, layout: str, value: int) -> bytes:
    changed = bytearray(packet)
    struct.pack_into(layout, changed, offset, value)
    return bytes(changed)


@pytest.mark.parametrize(
    ("packet", "fault", "word"),
    [
        (_with(pack(SPAN), 4, "<H", 2), FrameFault.VERSION, "version is 2"),
        (_with(pack(SPAN), 6, "<H", 77), FrameFault.UNKNOWN, "kind is 77"),
        (_with(pack(SPAN), 0, "<I", 0), FrameFault.MALFORMED, "header"),
        (_with(pack(SPAN), 12, "<I", 1), FrameFault.MALFORMED, "header"),
        (_with(pack(SPAN), 16 + 32, "<I", 9), FrameFault.MALFORMED, "span.dtype"),
        (_with(pack(SPAN), 16 + 44, "<I", 9), FrameFault.MALFORMED, "span.reserved"),
        (pack(dataclasses.replace(SPAN, layer=1)), FrameFault.MALFORMED, "covers nothing"),
        (pack(dataclasses.replace(SPAN, token=9)), FrameFault.MALFORMED, "covers nothing"),
        (b"\0" * (FRAME_MAX + 1), FrameFault.OVERSIZED, str(FRAME_MAX)),
    ],
)
def test_a_refusal_names_the_field(packet: bytes, fault: FrameFault, word: str) -> None:
    with pytest.raises(FrameError, match=word) as caught:
        parse(packet)
    assert caught.value.fault is fault


def test_the_longest_prompt_fits_in_a_frame_and_no_longer_one_is_taken() -> None:
    longest = Prefill(1, 2, b"p" * 32, b"w" * 32, Mode.WHOLE, 1, 0, (0,) * 64, (7,) * TOKENS_MAX)
    assert parse(pack(longest)) == longest
    with pytest.raises(FrameError, match=r"prefill\.tokens"):
        parse(pack(dataclasses.replace(longest, tokens=(7,) * (TOKENS_MAX + 1))))


def test_a_long_message_is_cut_at_a_character() -> None:
    frame = parse(pack(Failed(1, 2, Refusal.COMPUTE, "ä" * TEXT_MAX)))
    assert isinstance(frame, Failed)
    assert frame.text == "ä" * (TEXT_MAX // 2)


def test_an_announcement_comes_back_as_it_was() -> None:
    assert parse_hello(hello_of(FACTS)) == FACTS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""), ("name", "\ud800"), ("program", "00"), ("program", " " * 64 + "00" * 32), ("weights", 5),
        ("dtype", "FP8"), ("layers", 4), ("layers", True), ("windows", []), ("windows", [4, 4, 0, 4, None]),
        ("heads", 0), ("kv_heads", -1), ("head_dim", "8"), ("vocab", 2**40), ("widths", [512, 128]),
        ("widths", [TOKENS_MAX + 1]), ("streams", 1), ("recurrent", None),
    ],
)  # fmt: skip
def test_a_bad_announcement_is_refused_by_field(field: str, value: Any) -> None:
    fields = {**json.loads(hello_of(FACTS).text), field: value}
    with pytest.raises(FrameError, match=rf"hello\.{field}|hello\.windows"):
        parse_hello(Hello(json.dumps(fields)))


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"name": 1, "name": 2}', "nan"])
def test_what_is_no_announcement_is_refused(text: str) -> None:
    with pytest.raises(FrameError, match="hello"):
        parse_hello(Hello(text))


def test_an_announcement_with_a_missing_or_unknown_field_is_refused() -> None:
    fields = json.loads(hello_of(FACTS).text)
    with pytest.raises(FrameError, match=r"hello\.colour"):
        parse_hello(Hello(json.dumps({**fields, "colour": "red"})))
    del fields["heads"]
    with pytest.raises(FrameError, match=r"hello\.heads is missing"):
        parse_hello(Hello(json.dumps(fields)))


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4))
def test_any_value_of_any_field_is_understood_or_refused(value: Any) -> None:
    for field in json.loads(hello_of(FACTS).text):
        fields = {**json.loads(hello_of(FACTS).text), field: value}
        try:
            facts = parse_hello(Hello(json.dumps(fields)))
        except FrameError:
            continue
        assert parse_hello(hello_of(facts)) == facts
