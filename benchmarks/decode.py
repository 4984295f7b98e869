"""Steps of the CPU binding, with its own kernels and with torch's, in alternating runs.

    python benchmarks/decode.py --checkpoint DIR [--threads N] [--runs 5] [--json FILE]

Milliseconds of one step of 1, 2, 4 and 8 sequences that decode (the sampler included), and of a prompt, both in one
process and over the same weights. *floor*: reading all weights once at the machine's memory bandwidth (copying, both
ways).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.cpu.threads import HostThreads
from rowlock.bindings.device import Counters, Sampling
from rowlock.bindings.host_arena import HostArena
from rowlock.bindings.model.cache.geometry import DEFAULT_LIMITS, plan_geometry
from rowlock.bindings.model.cache.paged import PagedCache
from rowlock.bindings.model.config import ModelConfig, parse_config
from rowlock.bindings.model.decoder import Decoder, Programs
from rowlock.bindings.model.generation import DecoderSequence, Stepper
from rowlock.bindings.model.layout import layout_of

BATCHES = (1, 2, 4, 8)
PROMPTS = (16, 512)
STEPS = 20


def load(directory: Path) -> tuple[ModelConfig, dict[str, torch.Tensor], int]:
    """Weights of a bf16 checkpoint as the binding holds them, and their bytes."""
    with Checkpoint.open(directory) as checkpoint:
        config = parse_config(directory, checkpoint.config)
        layout = layout_of(checkpoint, config)
        weights, arena = {}, HostArena()
        for name, parent in layout.parents.items():
            data = arena.take(parent)
            for item in layout.in_parent(name):
                checkpoint.read_into(item.tensor.name, 0, data[item.offset : item.offset + item.tensor.nbytes])
            weights[name] = torch.from_numpy(data).view(torch.bfloat16).view(parent.rows, -1)
    return config, weights, layout.nbytes


def step_ms(cache: PagedCache, programs: Programs, batch: int) -> float:
    """The median step of so many sequences with some thirty tokens each."""
    stepper = Stepper(programs)
    prompts = [tuple(range(100 + i, 116 + i)) for i in range(batch)]
    sequences = [DecoderSequence.opened(cache, programs, prompt, Sampling(), 100) for prompt in prompts]
    while any(sequence.waiting > 1 for sequence in sequences):
        stepper.advance(sequences, 128)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        stepper.advance(sequences, 128)
        times.append((time.perf_counter() - start) * 1000)
    for sequence in sequences:
        sequence.close()
    return statistics.median(times)


def prompt_ms(cache: PagedCache, programs: Programs, length: int) -> float:
    cache.forget_prefixes()
    sequence = DecoderSequence.opened(cache, programs, tuple(range(100, 100 + length)), Sampling(), 600)
    start = time.perf_counter()
    while sequence.waiting > 1:
        Stepper(programs).advance([sequence], 128)
    taken = (time.perf_counter() - start) * 1000
    sequence.close()
    return taken


def floor_ms(nbytes: int) -> float:
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append((time.perf_counter() - start) * 1000 / 2)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config, weights, nbytes = load(options.checkpoint.resolve())
    threads = HostThreads(options.threads, Counters())
    geometry = plan_geometry(config, 2, DEFAULT_LIMITS, threads.free_bytes())
    cache = PagedCache(config, geometry, torch.bfloat16, torch.device("cpu"))
    arms = {"kernels": threads.create_decoder(config, weights), "torch": Decoder(config, weights)}
    found: dict[str, list[float]] = {}
    for run in range(options.runs + 1):
        for arm, programs in arms.items():
            torch.set_num_threads(1 if arm == "kernels" else options.threads)
            measured = {f"{arm}, step of {batch}": step_ms(cache, programs, batch) for batch in BATCHES}
            measured |= {f"{arm}, prompt of {length}": prompt_ms(cache, programs, length) for length in PROMPTS}
            if run:  # the first is a smoke run
                for name, value in measured.items():
                    found.setdefault(name, []).append(value)
    medians = {name: round(statistics.median(values), 1) for name, values in found.items()}
    medians["floor"] = round(floor_ms(nbytes), 1)
    for name, value in medians.items():
        print(f"  {name:<24}{value:>10.1f} ms")
    if options.json:
        options.json.write_text(json.dumps({"medians": medians, "runs": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
