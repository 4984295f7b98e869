"""Text to tokens and back, and where to stop, under one assets digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from tokenizers import Tokenizer

from rowlock.bindings.checkpoint.assets import Assets
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.header import parse_json_strictly
from rowlock.daemon.owner.chat import Conversation, read_chat_template
from rowlock.v1.errors import OwnerError, Reason

Prompt: TypeAlias = str | tuple[int, ...] | Conversation
"""What is to be continued or answered: a text, token ids, or messages for the chat template."""


class Text:
    """The tokenizer of a checkpoint and its stop tokens. Immutable; safe for use by several threads.

    Attributes:
        assets: what it was made from.
        eos_tokens: ids that end a generation.

    """

    def __init__(self, directory: Path, assets: Assets, config: dict[str, Any]) -> None:
        """Build the tokenizer.

        Args:
            directory: for error messages.
            assets: of the checkpoint.
            config: its ``config.json``; ``generation_config.json`` of the assets wins over it.

        Raises:
            CheckpointError: MISSING or MALFORMED, naming the file.

        """
        path = directory / "tokenizer.json"
        self.assets = assets
        self.config = config
        self.eos_tokens = _eos_tokens(directory, assets, config)
        self._chat_template = read_chat_template(directory, assets)
        raw = assets.files.get("tokenizer.json")
        if raw is None:
            raise CheckpointError(
                CheckpointFault.MISSING, path, "no such file", "save the checkpoint with a fast tokenizer"
            )
        try:
            self._tokenizer = Tokenizer.from_str(raw.decode("utf-8"))
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        except Exception as error:
            raise CheckpointError(CheckpointFault.MALFORMED, path, f"is not a tokenizer: {error}") from error

    @property
    def digest(self) -> str:
        return self.assets.digest

    def tokens_of(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of any prompt.

        Raises:
            OwnerError: ARGUMENT_INVALID, when it cannot be rendered or tokenised.

        """
        if isinstance(prompt, tuple):
            return prompt
        if isinstance(prompt, str):
            return self.encode(prompt)
        if self._chat_template is None:
            raise OwnerError(
                Reason.ARGUMENT_INVALID,
                "messages: the resident checkpoint has no chat template",
                "ask /v1/completions, or load a checkpoint with a chat_template.jinja",
            )
        return self.encode(self._chat_template.render(prompt), special=False)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids; with ``special``, those that the tokenizer itself adds are there.

        Raises:
            OwnerError: ARGUMENT_INVALID, when the tokenizer cannot write this text.

        """
        try:
            # encode() would hold the interpreter all the time: for a long text the owner would stand still for seconds
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
            return tuple(encoding.ids)
        except Exception as error:
            raise OwnerError(Reason.ARGUMENT_INVALID, f"prompt: cannot be tokenised: {error}") from error

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens, special ones left out."""
        decoded: str = self._tokenizer.decode(tokens)
        return decoded


class Texts:
    """Texts that somebody uses, to be used again for the same assets: reading a tokenizer takes a tenth of a second."""

    def __init__(self) -> None:
        self._used: WeakValueDictionary[str, Text] = WeakValueDictionary()

    def of(self, directory: Path, assets: Assets, config: dict[str, Any]) -> Text:
        """See :class:`Text`. Any thread."""
        known = self._used.get(assets.digest)
        if known is None or known.config != config:
            known = self._used[assets.digest] = Text(directory, assets, config)
        return known


def _eos_tokens(directory: Path, assets: Assets, config: dict[str, Any]) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    try:
        generation = parse_json_strictly(assets.files.get(path.name, b"{}"))
    except ValueError as error:
        raise CheckpointError(CheckpointFault.MALFORMED, path, f"is not valid JSON: {error}") from None
    if not isinstance(generation, dict):
        raise CheckpointError(CheckpointFault.MALFORMED, path, "is not a JSON object")
    value = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and item >= 0 for item in ids):
        raise CheckpointError(
            CheckpointFault.MALFORMED, path, f"eos_token_id is {str(value)[:80]!r}, not a token id or a list of them"
        )
    return tuple(ids)


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
