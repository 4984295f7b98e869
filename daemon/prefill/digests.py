"""The digests that a source announces, for an engine that loads its weights by other means."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rowlock.bindings.checkpoint.config import program_digest, tied_aliases
from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.hashing import Hasher


def checkpoint_digests(directory: Path, threads: int = 1) -> tuple[bytes, bytes]:
    """Program digest and weights root of a checkpoint, 32 bytes each; every byte of it is read.

    Raises:
        CheckpointError: it is none, or changed meanwhile.

    """
    with Checkpoint.open(directory) as checkpoint, ThreadPoolExecutor(threads) as executor:
        manifest = Hasher(executor).manifest(checkpoint, tied_aliases(checkpoint.config))
        return bytes.fromhex(program_digest(checkpoint.config)), bytes.fromhex(manifest.root)
