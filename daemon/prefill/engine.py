"""What a source needs of a device: compute one prompt, and give its K/V away piece by piece.

An engine for another device is a class with two members, and a factory that makes it. It runs in the process of
``rowlock prefill-worker``, in whatever environment its device needs, and imports nothing else of this project.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from rowlock.daemon.prefill.protocol.hello import SourceFacts

States = npt.NDArray[np.generic]
"""Values as they lie in memory. Their type only has the right size: two bytes stand for a bfloat16."""

DEFAULT_WIDTHS: Final = (128, 512, 2048, 8192)
DEFAULT_FACTORY: Final = "rowlock.daemon.prefill.decoder_engine:create"


@dataclass(frozen=True)
class EngineOptions:
    """What a factory is told, from the command line of the source.

    Attributes:
        checkpoint: directory of the weights.
        device: as the factory understands it.
        threads: of the host.
        widths: lengths to make programs for, ascending.
        extra: ``--option NAME=VALUE``, for this factory alone.

    """

    checkpoint: Path
    device: str = "cpu"
    threads: int = 1
    widths: tuple[int, ...] = DEFAULT_WIDTHS
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """One prompt to compute.

    Attributes:
        tokens: the prompt.
        width: the prepared length that it fits in. What is computed past the prompt goes nowhere.
        layers: layers of one block, at most.
        chunk: tokens of one block, at most.

    """

    tokens: tuple[int, ...]
    width: int
    layers: int
    chunk: int


@dataclass(frozen=True)
class Block:
    """K/V of some layers and positions.

    Attributes:
        layer: the first.
        token: the first.
        states: ``[layers, 2, kv_heads, tokens, head_dim]``; read before the engine is asked for more.

    """

    layer: int
    token: int
    states: States

    @property
    def layer_stop(self) -> int:
        return self.layer + len(self.states)

    @property
    def token_stop(self) -> int:
        return self.token + int(self.states.shape[3])


def widths_within(context: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Widths of which none is longer than the context, and one as long where a longer one was asked for."""
    return tuple(sorted({min(width, context) for width in widths}))


class EngineError(Exception):
    """The device could not compute a prompt. The engine can go on with others."""


class Engine(Protocol):
    """A resident model on a device. Called from one thread."""

    @property
    def facts(self) -> SourceFacts:
        """What it announces; the same for its whole life."""
        ...

    def prefill(self, work: Work) -> Generator[Block, None, States]:
        """Compute a prompt: its blocks, each position of each layer in one of them, then its last logits ``[vocab]``.

        Whoever asks may stop asking at any block. Raises EngineError.
        """
        ...


Factory = Callable[[EngineOptions], Engine]


def load_factory(name: str) -> Factory:
    """The function that ``module:function`` names. Only ever given by whoever starts the process.

    Raises:
        ValueError: there is none.

    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ValueError(f"factory {name!r}: wanted is module:function")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"factory {name!r}: {error}") from error
    if not callable(found):
        raise ValueError(f"factory {name!r}: is no function")
    return cast(Factory, found)
