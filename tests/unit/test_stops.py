"""Stop strings: the one that is complete first, wherever pieces of text begin and end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rowlock.daemon.answering.stops import StopStrings

ALPHABET = "aab."
texts = st.text(ALPHABET, max_size=30)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """By definition: up to the shortest beginning of the text that ends in a stop string."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(texts, stop_lists, st.lists(st.integers(0, 30), max_size=6))
def test_any_pieces_give_the_text_before_the_first_stop_string(text: str, stops: list[str], borders: list[int]) -> None:
    finder, found = StopStrings(tuple(stops)), ""
    at = 0
    for border in [*sorted(borders), len(text)]:
        if not finder.found:
            found += finder.add(text[at:border])
            at = max(at, border)
    found += finder.finish()
    assert (found, finder.found) == cut(text, stops)


@given(texts, stop_lists)
def test_what_is_given_out_is_never_part_of_a_stop_string_and_nothing_else_is_held(text: str, stops: list[str]) -> None:
    finder, given_out = StopStrings(tuple(stops)), ""
    for index, character in enumerate(text):
        given_out += finder.add(character)
        if finder.found:
            return
        held = text[: index + 1][len(given_out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
