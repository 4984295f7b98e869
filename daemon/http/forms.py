"""OpenAI's response objects, whole and in chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Protocol

from rowlock.daemon.answering.answers import Finish


@dataclass(frozen=True)
class Head:
    """What every object of one response begins with.

    Attributes:
        created: seconds since the epoch.
        fingerprint: digest of the identity that answers.

    """

    id: str
    created: int
    model: str
    fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(frozen=True)
class Usage:
    """Tokens of one response. Those that a stop string was found in count; an end-of-sequence token does not."""

    prompt_tokens: int
    completion_tokens: int

    def fields(self) -> dict[str, int]:
        return {**vars(self), "total_tokens": self.prompt_tokens + self.completion_tokens}


class Form(Protocol):
    """How one endpoint writes answers."""

    @property
    def prefix(self) -> str:
        """Of response ids."""
        ...

    @property
    def whole(self) -> str:
        """``object`` of a complete response."""
        ...

    @property
    def chunk(self) -> str:
        """``object`` of an event."""
        ...

    def choice(self, index: int, text: str, finish: Finish) -> dict[str, Any]:
        """One complete answer."""
        ...

    def delta(self, index: int, text: str, finish: Finish | None) -> dict[str, Any]:
        """A part of one."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """What comes before the first part, if anything does."""
        ...


class CompletionForm:
    """``/v1/completions``."""

    prefix: Final = "cmpl"
    whole: Final = "text_completion"
    chunk: Final = "text_completion"

    def choice(self, index: int, text: str, finish: Finish) -> dict[str, Any]:
        return self.delta(index, text, finish)

    def delta(self, index: int, text: str, finish: Finish | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def opening(self, index: int) -> dict[str, Any] | None:
        return None


class ChatForm:
    """``/v1/chat/completions``."""

    prefix: Final = "chatcmpl"
    whole: Final = "chat.completion"
    chunk: Final = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: Finish) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def delta(self, index: int, text: str, finish: Finish | None) -> dict[str, Any]:
        return {"index": index, "delta": {"content": text} if text else {}, "logprobs": None, "finish_reason": finish}

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
