"""Short ways to run tiny models on the RNGD binding, without an owner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from rowlock.bindings.address import DeviceAddress
from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.device import Binding, Runtime, Sampling
from rowlock.bindings.model.config import ModelConfig, parse_config
from rowlock.bindings.model.layout import Layout, layout_of
from rowlock.bindings.rngd.binding import RngdBinding, open_rngd

SHORT: dict[str, Any] = {"max_position_embeddings": 256}
"""A context for which two programs are enough."""


def opened(programs: Path) -> RngdBinding:
    return open_rngd(DeviceAddress("rngd", 0, 0), programs, without_hardware=True)


def model_of(directory: Path) -> tuple[ModelConfig, Layout]:
    with Checkpoint.open(directory) as checkpoint:
        config = parse_config(directory, checkpoint.config)
        return config, layout_of(checkpoint, config)


def build_programs(directory: Path, programs: Path) -> None:
    binding = opened(programs)
    binding.prepare(*model_of(directory), ())
    binding.close()


def load(binding: Binding, directory: Path) -> Runtime:
    """A runtime with the bytes of a checkpoint."""
    config, layout = model_of(directory)
    binding.prepare(config, layout, ())
    runtime = binding.create_runtime(config, layout)
    with Checkpoint.open(directory) as checkpoint:
        for item in layout.placements.values():
            data = np.empty(item.tensor.nbytes, np.uint8)
            checkpoint.read_into(item.tensor.name, 0, data)
            binding.memory.write_rows(runtime.allocations[item.parent], item.first_row, data)
    binding.memory.fence()
    return runtime


def greedy(runtime: Runtime, prompt: tuple[int, ...], count: int = 16) -> list[int]:
    sequence = runtime.open_sequence(prompt, Sampling(), len(prompt) + count)
    tokens: list[int] = []
    while len(tokens) < count:
        (step,) = runtime.advance([sequence])
        if isinstance(step, Exception):
            raise step
        if step is not None:
            tokens.append(step)
    sequence.close()
    return tokens


def negate_f32(row: bytes) -> bytes:
    return (-np.frombuffer(row, np.float32)).tobytes()


def digests(directory: Path) -> dict[str, str]:
    """Every file below a directory."""
    return {
        str(path.relative_to(directory)): blake3(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
