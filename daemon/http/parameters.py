"""From the bodies of OpenAI's requests to questions: every field is honoured, or refused by name."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any, Final

from rowlock.daemon.answering.question import (
    SEED_MAX,
    STOPS_MAX,
    Question,
    checked_sampling,
    checked_stops,
)
from rowlock.daemon.http.fields import Fields
from rowlock.daemon.http.problems import HttpError
from rowlock.daemon.owner.chat import Conversation, Message
from rowlock.daemon.owner.text import Prompt

PROMPTS_MAX: Final = 32
"""Prompts of one completion request."""
MESSAGES_MAX: Final = 4096
TOKENS_MAX: Final = 2**31 - 1
ROLES: Final = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class Call:
    """One HTTP request for answers.

    Attributes:
        questions: one for each choice of the response.
        stream: server-sent events, as the answer comes.
        include_usage: a last event counts tokens.

    """

    questions: tuple[Question, ...]
    stream: bool
    include_usage: bool


@dataclass(frozen=True)
class Frame:
    """What does not come from the body.

    Attributes:
        model: the name that callers have to use.
        identity: pinned by the caller, or empty.
        deadline_s: of the response.

    """

    model: str
    identity: str
    deadline_s: float


def completion_call(body: dict[str, Any], frame: Frame) -> Call:
    """A request of ``/v1/completions``. Raises HttpError or OwnerError, naming the field."""
    fields = Fields(body)
    prompts = _prompts(fields)
    for name, harmless in (("echo", False), ("best_of", 1), ("suffix", "")):
        fields.only(name, harmless)
    fields.only("logprobs", False)
    max_tokens = fields.count("max_tokens", 1, TOKENS_MAX)
    return _call(fields, prompts, max_tokens, frame)


def chat_call(body: dict[str, Any], frame: Frame) -> Call:
    """A request of ``/v1/chat/completions``. Raises HttpError or OwnerError, naming the field."""
    fields = Fields(body)
    conversation = Conversation(_messages(fields))
    for name, harmless in (
        ("logprobs", False), ("top_logprobs", 0), ("response_format", {"type": "text"}), ("modalities", ["text"]),
        ("tools", []), ("tool_choice", "none"), ("functions", []), ("function_call", "none"),
    ):  # fmt: skip
        fields.only(name, harmless)
    older, newer = (fields.count(name, 1, TOKENS_MAX) for name in ("max_tokens", "max_completion_tokens"))
    if older is not None and newer is not None and older != newer:
        raise fields.invalid("max_tokens", "is not max_completion_tokens: give one of them")
    return _call(fields, (conversation,), older or newer, frame)


def _call(fields: Fields, prompts: tuple[Prompt, ...], max_tokens: int | None, frame: Frame) -> Call:
    """The fields that both kinds of request have."""
    model = fields.text("model", frame.model)
    if model != frame.model:
        raise HttpError(
            404, f"model: there is no {model[:80]!r}; this owner serves {frame.model!r}", param="model",
            code="model_not_found",
        )  # fmt: skip
    fields.only("n", 1)
    for name in ("presence_penalty", "frequency_penalty"):
        fields.only(name, 0, 0.0)
    fields.only("logit_bias", {})
    fields.ignore("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
    seed = fields.count("seed", -(2**63), SEED_MAX)
    sampling = checked_sampling(
        fields.number("temperature", 1.0),
        fields.number("top_p", 1.0),
        fields.count("top_k", 0, TOKENS_MAX) or 0,
        secrets.randbits(63) if seed is None else seed % 2**64,
    )
    stops = _stops(fields)
    ignore_eos = fields.flag("ignore_eos")
    stream, include_usage = _stream(fields)
    fields.end()
    questions = [
        Question(prompt, max_tokens, sampling, stops, ignore_eos, frame.identity, frame.deadline_s)
        for prompt in prompts
    ]
    return Call(tuple(questions), stream, include_usage)


def _prompts(fields: Fields) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of either."""
    value = fields.take("prompt")
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        raise fields.invalid("prompt", "is not a text, a list of token ids, or a list of these")
    if _are_tokens(value):
        return (tuple(value),)
    if len(value) > PROMPTS_MAX:
        raise fields.invalid("prompt", f"has {len(value)} prompts; at most {PROMPTS_MAX}")
    prompts: list[Prompt] = []
    for index, item in enumerate(value):
        if not (isinstance(item, str) or (isinstance(item, list) and item and _are_tokens(item))):
            raise fields.invalid(f"prompt[{index}]", "is neither a text nor a list of token ids")
        prompts.append(item if isinstance(item, str) else tuple(item))
    return tuple(prompts)


def _are_tokens(value: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item <= TOKENS_MAX for item in value)


def _messages(fields: Fields) -> tuple[Message, ...]:
    value = fields.take("messages")
    if not isinstance(value, list) or not 0 < len(value) <= MESSAGES_MAX:
        raise fields.invalid("messages", f"is not a list of 1 to {MESSAGES_MAX} messages")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise Fields({}).invalid(where, "is not an object")
    fields = Fields(value, f"{where}.")
    role = fields.text("role")
    if role not in ROLES:
        raise fields.invalid("role", f"is none of {', '.join(ROLES)}")
    content = fields.take("content")
    if isinstance(content, list):
        content = "".join(_text_part(item, f"{where}.content[{index}]") for index, item in enumerate(content))
    if not isinstance(content, str):
        raise fields.invalid("content", "is not a text, nor a list of text parts")
    for name in ("name", "refusal", "audio", "tool_calls", "function_call"):
        fields.only(name)
    fields.end()
    return Message(role, content)


def _text_part(value: Any, where: str) -> str:
    if not isinstance(value, dict):
        raise Fields({}).invalid(where, "is not an object")
    fields = Fields(value, f"{where}.")
    if fields.text("type") != "text":
        raise fields.invalid("type", "is not 'text': other parts are not supported", "unsupported_parameter")
    text = fields.text("text")
    fields.end()
    return text


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fields.invalid("stop", f"is not a text, nor a list of up to {STOPS_MAX}")
    return checked_stops(tuple(stops))


def _stream(fields: Fields) -> tuple[bool, bool]:
    stream, value = fields.flag("stream"), fields.take("stream_options")
    if value is None:
        return stream, False
    if not stream or not isinstance(value, dict):
        raise fields.invalid("stream_options", "is not an object" if stream else "goes with stream")
    options = Fields(value, "stream_options.")
    include_usage = options.flag("include_usage")
    options.end()
    return stream, include_usage
