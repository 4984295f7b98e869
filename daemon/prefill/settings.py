"""How a source is started, and when it is given up: trusted configuration, never a client's."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from rowlock.daemon.prefill.engine import DEFAULT_FACTORY, DEFAULT_WIDTHS
from rowlock.daemon.prefill.protocol.frames import Mode


@dataclass(frozen=True)
class SourceSettings:
    """One source.

    Attributes:
        factory: ``module:function`` that makes its engine, in its own environment.
        python: the interpreter of that environment.
        device: as the factory understands it.
        threads: of the host, for the source.
        widths: lengths that it makes programs for.
        extra: further options of the factory.
        memory_max: bytes of K/V and logits of one request, at most.
        start_s: in which it has to announce itself.
        silence_s: it is given up when it has a prompt and says nothing for so long.
        pace_ms: benchmarks only: computing one layer of one block takes so long, see ``pacing.py``.

    """

    factory: str = DEFAULT_FACTORY
    python: str = sys.executable
    device: str = "cpu"
    threads: int = 1
    widths: tuple[int, ...] = DEFAULT_WIDTHS
    extra: dict[str, str] = field(default_factory=dict)
    memory_max: int = 4 * 1024**3
    start_s: float = 600.0
    silence_s: float = 120.0
    pace_ms: float = 0.0

    def command(self, checkpoint: Path, fd: int, parent: int) -> list[str]:
        """What starts it, over a checkpoint, with its end of the socket as descriptor ``fd``."""
        options = {
            "--factory": self.factory,
            "--checkpoint": str(checkpoint),
            "--device": self.device,
            "--threads": str(self.threads),
            "--widths": ",".join(map(str, self.widths)),
            "--memory-max": str(self.memory_max),
            "--pace-ms": str(self.pace_ms),
            "--socket-fd": str(fd),
            "--parent": str(parent),
        }
        extra = [part for name, value in self.extra.items() for part in ("--option", f"{name}={value}")]
        fixed = [part for pair in options.items() for part in pair]
        return [self.python, "-m", "rowlock.cli", "prefill-worker", *fixed, *extra]


@dataclass(frozen=True)
class PrefillSettings:
    """How prompts are computed elsewhere.

    Attributes:
        source: who computes them.
        mode: whole results, or spans as they are ready.
        layers_per_span: of a span, streaming only.
        chunk: tokens of a span, streaming only; 0 is all of a prompt.
        stream_from: shorter prompts are transferred whole even when streaming.
        prefetch: prompts of requests that wait for others to end are computed and imported already.
        fallback: compute here what no source can; else such a request fails.
        required: a transition whose target the source cannot follow is refused; else the source is let go.

    """

    source: SourceSettings = field(default_factory=SourceSettings)
    mode: Mode = Mode.WHOLE
    layers_per_span: int = 1
    chunk: int = 0
    stream_from: int = 0
    prefetch: bool = True
    fallback: bool = False
    required: bool = True
