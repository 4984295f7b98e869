"""What the CPU binding answers, whatever device a suite runs on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.cpu.binding import CpuBinding
from rowlock.bindings.cpu.decode import NativeDecoder
from rowlock.bindings.device import Sampling
from rowlock.bindings.model.cache.table import BlockTable, table_for_one
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.decoder import Decoder
from rowlock.bindings.model.layout import layout_of
from rowlock.bindings.model.runtime import DecoderRuntime


def loaded(binding: CpuBinding, directory: Path) -> DecoderRuntime:
    """A runtime that holds a checkpoint."""
    with Checkpoint.open(directory) as checkpoint:
        config = parse_config(directory, checkpoint.config)
        layout = layout_of(checkpoint, config)
        runtime = binding.create_runtime(config, layout)
        for name, placement in layout.placements.items():
            data = np.empty(placement.tensor.nbytes, np.uint8)
            checkpoint.read_into(name, 0, data)
            binding.memory.write_rows(runtime.allocations[placement.parent], placement.first_row, data)
    binding.memory.fence()
    return runtime


def decoder_of(runtime: DecoderRuntime) -> Decoder:
    """The decoder in torch over a runtime's weights, whether or not it is what answers requests."""
    programs = runtime._programs
    decoder = programs._decoder if isinstance(programs, NativeDecoder) else programs
    assert isinstance(decoder, Decoder)
    return decoder


def new_table(decoder: Decoder, capacity: int) -> BlockTable:
    """K/V of a sequence that shares pages with nobody."""
    return table_for_one(decoder.config, capacity, decoder.dtype, decoder.device)


def greedy(runtime: DecoderRuntime, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens of a loaded runtime."""
    return sampled(runtime, prompt, count, Sampling())


def sampled(runtime: DecoderRuntime, prompt: tuple[int, ...], count: int, sampling: Sampling) -> list[int]:
    """Tokens of a loaded runtime, an end-of-sequence token like any other."""
    sequence = runtime.open_sequence(prompt, sampling, len(prompt) + count)
    found: list[int] = []
    while len(found) < count:
        (token,) = runtime.advance([sequence])
        if token is not None:
            assert isinstance(token, int), token
            found.append(token)
    sequence.close()
    return found


def cpu_tokens(directory: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """Greedy tokens of a checkpoint on a fresh CPU binding."""
    binding = CpuBinding(threads=1)
    tokens = greedy(loaded(binding, directory), prompt, count)
    binding.close()
    return tokens
