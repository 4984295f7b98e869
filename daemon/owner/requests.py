"""Requests for generation, as the owner thread sees them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.device import Sampling
from rowlock.daemon.owner.text import Prompt, Text
from rowlock.v1.errors import OwnerError, Reason


@dataclass(frozen=True)
class Lease:
    """A counted hold of one request on the resident weights: its answer has one identity."""

    identity: Identity
    generation: int
    text: Text


class Sink(Protocol):
    """Where an answer goes. Called from the owner thread; must not block."""

    def started(self, lease: Lease, prompt_tokens: int) -> None: ...

    def token(self, token: int) -> None: ...

    def finished(self, *, stopped: bool) -> None:
        """The last call of a good answer; ``stopped``: an end-of-sequence token was met."""
        ...

    def failed(self, error: Exception) -> None:
        """The last call of any other."""
        ...


class GivenUp(threading.Event):
    """The flag by which a client gives up.

    Attributes:
        heard: called when it is set: an owner that waits for something else is woken.

    """

    def __init__(self) -> None:
        super().__init__()
        self.heard: Callable[[], None] = lambda: None

    def set(self) -> None:
        super().set()
        self.heard()


@dataclass(frozen=True)
class GenerationRequest:
    """One request. Frozen, but for the flag by which its client gives up.

    Attributes:
        prompt: tokenised under the assets that are resident when the request is admitted.
        max_tokens: new tokens; None for what the context has left.
        tokens: ``prompt`` tokenised under ``assets``, when that was done ahead.
        assets: digest of the assets that ``tokens`` were made with.

    """

    id: str
    prompt: Prompt
    max_tokens: int | None
    sampling: Sampling
    ignore_eos: bool
    sink: Sink
    tokens: tuple[int, ...] = ()
    assets: str = ""
    cancelled: GivenUp = field(default_factory=GivenUp)


def check_context(prompt: int, new: int, context: int) -> None:
    """Refuse tokens that a context does not hold. Raises OwnerError."""
    if prompt + max(new, 1) > context:
        raise OwnerError(
            Reason.CONTEXT_EXCEEDED,
            f"{prompt} prompt tokens and {max(new, 1)} new ones exceed the context of {context}",
        )
