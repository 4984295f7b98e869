"""Conversations as text: the chat template of a checkpoint, in jinja's immutable sandbox.

A template is data of the checkpoint, and still gets nothing but plain values and no way to the interpreter. What it is
given is what ``transformers.apply_chat_template`` gives it, so that the text is the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from rowlock.bindings.checkpoint.assets import Assets
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.header import parse_json_strictly
from rowlock.v1.errors import OwnerError, Reason

SPECIAL_TOKENS: Final = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
"""Special tokens that a template may name."""


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """Messages to be answered, oldest first."""

    messages: tuple[Message, ...]


class ChatTemplate:
    """The chat template of a checkpoint. Immutable; safe for use by several threads."""

    def __init__(self, path: Path, source: str, special_tokens: dict[str, str]) -> None:
        """Compile a template.

        Raises:
            CheckpointError: MALFORMED, naming the file and the line of the template.

        """
        self._special_tokens = special_tokens
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(
                CheckpointFault.MALFORMED, path, f"chat template, line {error.lineno}: {error.message}"
            ) from error

    def render(self, conversation: Conversation) -> str:
        """The text that asks for the next answer.

        Raises:
            OwnerError: ARGUMENT_INVALID, with what the template has against these messages.

        """
        messages = [{"role": item.role, "content": item.content} for item in conversation.messages]
        try:
            return self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except Exception as error:
            raise OwnerError(Reason.ARGUMENT_INVALID, f"messages: the chat template refuses them: {error}") from error


def read_chat_template(directory: Path, assets: Assets) -> ChatTemplate | None:
    """The template of a checkpoint: of ``chat_template.jinja``, else of a JSON file; None if there is none.

    Raises:
        CheckpointError: MALFORMED, naming the file.

    """
    config = _json_object(directory, assets, "tokenizer_config.json")
    special_tokens = _special_tokens({**_json_object(directory, assets, "special_tokens_map.json"), **config})
    raw = assets.files.get("chat_template.jinja")
    if raw is not None:
        path = directory / "chat_template.jinja"
        try:
            return ChatTemplate(path, raw.decode("utf-8"), special_tokens)
        except UnicodeDecodeError as error:
            raise CheckpointError(CheckpointFault.MALFORMED, path, f"is not UTF-8: {error}") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        source = _named_default(_json_object(directory, assets, name).get("chat_template"))
        if source is not None:
            if not isinstance(source, str):
                raise CheckpointError(CheckpointFault.MALFORMED, directory / name, "chat_template is not a text")
            return ChatTemplate(directory / name, source, special_tokens)
    return None


def _named_default(value: Any) -> Any:
    """The template called ``default``, where there is a list of named ones."""
    if not isinstance(value, list):
        return value
    named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
    return named.get("default")


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _json_object(directory: Path, assets: Assets, name: str) -> dict[str, Any]:
    try:
        value = parse_json_strictly(assets.files.get(name, b"{}"))
    except ValueError as error:
        raise CheckpointError(CheckpointFault.MALFORMED, directory / name, f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(CheckpointFault.MALFORMED, directory / name, "is not a JSON object")
    return value


class _Generation(Extension):
    """``{% generation %}``: templates mark with it what an assistant wrote; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja's name and type

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """A namespace without names that lead into the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(
        dict=_plain_dict, namespace=_PlainNamespace, raise_exception=_raise_exception, strftime_now=_strftime_now
    )
    return environment


def _plain_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """``dict`` itself would lead to its base classes."""
    return dict(*args, **kwargs)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """As the templates expect it: jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)  # noqa: DTZ005 - local time, as the templates expect
