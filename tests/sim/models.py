"""The checkpoints that simulations move between: as small as groups allow."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.checkpoints import EMBED, K0, NORM, change_rows, copy, negate, write_tiny

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import layout_of

CONFIG: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 256,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
"""The embedding has three groups of digests; every other tensor has one."""


@dataclass(frozen=True)
class Models:
    """Checkpoint directories, by name.

    ``a`` and ``b`` differ in rows of three parents; ``c`` differs from ``a`` elsewhere; ``assets`` only in its stop
    tokens; ``program`` in its config, so it can only be loaded.
    """

    root: Path

    @classmethod
    def make(cls, root: Path) -> Models:
        a = write_tiny(root / "a", 1, **CONFIG)
        step = change_rows(a, root / "b1", EMBED, [3, 4, 130, 259], negate)
        step = change_rows(step, root / "b2", NORM, [0], negate)
        change_rows(step, root / "b", K0, [2], negate)
        change_rows(a, root / "c", K0, [0, 1, 15], negate)
        write_json(copy(a, root / "assets") / "generation_config.json", {"eos_token_id": [9]})
        write_json(
            copy(a, root / "program") / "config.json",
            {**json.loads((a / "config.json").read_text()), "rope_theta": 500.0},
        )
        return cls(root)

    def __getitem__(self, name: str) -> Path:
        return self.root / name


def expected_parents(directory: Path) -> dict[str, bytes]:
    """The bytes of every parent of a checkpoint: the members' files, end to end."""
    with Checkpoint.open(directory) as checkpoint:
        layout = layout_of(checkpoint, parse_config(directory, checkpoint.config))
        found = {}
        for parent in layout.parents:
            parts = []
            for placement in layout.in_parent(parent):
                out = np.empty(placement.tensor.nbytes, np.uint8)
                checkpoint.read_into(placement.tensor.name, 0, out)
                parts.append(out.tobytes())
            found[parent] = b"".join(parts)
    return found


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
