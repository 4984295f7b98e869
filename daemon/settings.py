"""What a daemon is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Options of ``rowlock serve``.

    Attributes:
        device: e.g. ``cpu``.
        state: directory of the journal and what belongs to it.
        socket: unix socket of the gRPC API.
        checkpoint: loaded on a first start; later starts load what was published last.
        threads: of one device operation, and of hashing.
        fault_file: test option of the CPU binding.

    """

    device: str
    state: Path
    socket: Path
    checkpoint: Path | None
    threads: int
    fault_file: Path | None = None
