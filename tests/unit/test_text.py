"""Streaming text: what is given out never has to be taken back, and nothing is lost."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from threading import Event, Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import TINY, copy

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.daemon.owner.text import Text, Texts, TextStream


def text_of(directory: Path, **config: object) -> Text:
    with Checkpoint.open(directory) as checkpoint:
        return Text(directory, checkpoint.assets, {**TINY, **config})


@pytest.fixture(scope="module")
def text(tiny: Path) -> Text:
    return text_of(tiny)


def streamed(text: Text, tokens: list[int]) -> list[str]:
    stream = TextStream(text)
    return [*(stream.add([token]) for token in tokens), stream.finish()]


@given(st.text(max_size=60))
def test_pieces_join_to_the_whole(text: Text, content: str) -> None:
    tokens = list(text.encode(content))
    assert "".join(streamed(text, tokens)) == text.decode(tokens)


def test_a_character_appears_when_its_last_byte_does(text: Text) -> None:
    tokens = list(text.encode("a\u20acb"))
    assert streamed(text, tokens) == ["a", "", "", "\u20ac", "b", ""]


def test_an_incomplete_character_is_not_lost(text: Text) -> None:
    tokens = list(text.encode("a\u20ac"))[:-1]
    assert "".join(streamed(text, tokens)) == "a\ufffd"


@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_bytes_join_to_the_whole(text: Text, tokens: list[int]) -> None:
    assert "".join(streamed(text, tokens)) == text.decode(tokens)


def test_a_broken_tokenizer_is_refused(tiny: Path, tmp_path: Path) -> None:
    directory = copy(tiny, tmp_path / "broken")
    (directory / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        text_of(directory)
    assert caught.value.fault is CheckpointFault.MALFORMED
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError) as caught:
        text_of(directory)
    assert caught.value.fault is CheckpointFault.MISSING


def test_stop_tokens_may_be_one_or_several_and_the_generation_config_wins(tiny: Path, tmp_path: Path) -> None:
    assert text_of(tiny, eos_token_id=[1, 2]).eos_tokens == (1, 2)
    assert text_of(tiny, eos_token_id=None).eos_tokens == ()
    directory = copy(tiny, tmp_path / "generation")
    (directory / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert text_of(directory).eos_tokens == (9,)
    for bad in ('{"eos_token_id": "9"}', '{"eos_token_id": [true]}', "[]", "{"):
        (directory / "generation_config.json").write_text(bad)
        with pytest.raises(CheckpointError, match="generation_config"):
            text_of(directory)


def test_others_run_while_a_long_text_is_tokenised(text: Text) -> None:
    """The owner thread among them. Where the interpreter is held, they have one turn before it and one behind it."""
    begun, done = Event(), Event()

    def encode() -> None:
        begun.set()
        text.encode("a long text " * 100_000)
        done.set()

    worker = Thread(target=encode)
    worker.start()
    begun.wait()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    worker.join()
    assert turns > 5


def test_a_text_in_use_is_used_again_for_the_same_assets_and_config(tiny: Path) -> None:
    texts = Texts()
    with Checkpoint.open(tiny) as checkpoint:
        first = texts.of(tiny, checkpoint.assets, TINY)
        assert texts.of(Path("elsewhere"), checkpoint.assets, dict(TINY)) is first
        other = texts.of(tiny, checkpoint.assets, {**TINY, "eos_token_id": 7})
        assert (first.eos_tokens, other.eos_tokens) == ((256,), (7,))
        alive = weakref.ref(other)
        del first, other
        gc.collect()
        assert alive() is None, "nobody uses it any more"
