"""Text to tokens and back, under one assets digest."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from rowlock.bindings.checkpoint.assets import Assets
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault


class Text:
    """The tokenizer of a checkpoint. Immutable; safe for use by several threads."""

    def __init__(self, directory: Path, assets: Assets) -> None:
        """Build the tokenizer.

        Raises:
            CheckpointError: MISSING or MALFORMED tokenizer.json.

        """
        path = directory / "tokenizer.json"
        self.assets = assets
        raw = assets.files.get("tokenizer.json")
        if raw is None:
            raise CheckpointError(
                CheckpointFault.MISSING, path, "no such file", "save the checkpoint with a fast tokenizer"
            )
        try:
            self._tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(CheckpointFault.MALFORMED, path, f"is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def digest(self) -> str:
        return self.assets.digest

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids, with the special tokens that the tokenizer itself adds."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, special ones left out."""
        decoded: str = self._tokenizer.decode(tokens)
        return decoded


class TextStream:
    """Text of one answer as its tokens arrive: only what later tokens cannot change is given out.

    A few tokens of context are decoded again before each new one, because some
    tokenizers write a token differently at the start of a text.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._context = 0
        self._given = 0

    def add(self, tokens: list[int]) -> str:
        """The text that is now certain."""
        self._tokens += tokens
        new = self._new_text()
        if new.endswith("\ufffd"):
            return ""
        self._context, self._given = self._given, len(self._tokens)
        return new

    def finish(self) -> str:
        """What is left, incomplete characters included."""
        return self._new_text()

    def _new_text(self) -> str:
        known = self._text.decode(self._tokens[self._context : self._given])
        return self._text.decode(self._tokens[self._context :])[len(known) :]
