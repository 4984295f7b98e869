"""Digesting a checkpoint against BLAKE3's own speed, and planning from manifests.

    python benchmarks/manifest.py --checkpoint DIR [--json FILE]

- *manifest*: all group digests of page-cached files, against reading the same file into warm memory and hashing
  64 KiB pieces of it with the same threads; five alternating runs.
- *plan*: from cached manifests, of this checkpoint; and comparing two synthetic manifests of an 8B model (Llama 3.1
  shapes, bf16, 1000 groups differ), with parsing one of them from its file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from blake3 import blake3

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.hashing import Hasher
from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.checkpoint.manifest import Manifest, TensorManifest
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import build_layout
from rowlock.bindings.plan import Model
from rowlock.bindings.planner import Policy, plan_transition

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
CHUNK = 4 << 20


def median_ms(job: Callable[[], object], runs: int = 5) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        job()
        times.append((time.perf_counter() - start) * 1000)
    return round(statistics.median(times), 2)


def against_blake3(base: Path, threads: int) -> dict[str, float]:
    """Milliseconds, alternating, of the manifest and of its two floors with the same threads."""
    with Checkpoint.open(base) as checkpoint, ThreadPoolExecutor(threads) as executor:
        hasher = Hasher(executor)
        path = next(iter(checkpoint.extents.values())).path
        data = np.fromfile(path, np.uint8)[: checkpoint.stamps[path.name].size // CHUNK * CHUNK]
        spans = [slice(start, start + CHUNK) for start in range(0, data.nbytes, CHUNK)]
        scratch = np.ones(data.nbytes, np.uint8)

        def blake(span: slice) -> None:
            view = data[span].data
            for start in range(0, CHUNK, 65536):
                blake3(view[start : start + 65536]).digest()

        with open(path, "rb") as file:
            jobs: dict[str, Callable[[], object]] = {
                "manifest": lambda: hasher.manifest(checkpoint, {}),
                "blake3": lambda: list(executor.map(blake, spans)),
                "read": lambda: list(
                    executor.map(lambda s: os.preadv(file.fileno(), [scratch[s].data], s.start), spans)
                ),
            }
            times: dict[str, list[float]] = {name: [] for name in jobs}
            for _ in range(6):
                for name, job in jobs.items():
                    start = time.perf_counter()
                    job()
                    times[name].append((time.perf_counter() - start) * 1000)
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    size = data.nbytes / 1e6
    return {
        **{f"{name.replace(' ', '_')}_gb_s": round(size / value, 2) for name, value in medians.items()},
        "of_blake3": round(medians["blake3"] / medians["manifest"], 2),
        "of_blake3_and_read": round((medians["blake3"] + medians["read"]) / medians["manifest"], 2),
    }


def synthetic_plan(directory: Path) -> dict[str, float]:
    layout = build_layout(parse_config(directory, LLAMA_8B), "BF16")
    random = np.random.default_rng(0)
    old, new = [], []
    for placement in layout.placements.values():
        info = placement.tensor
        digests = random.bytes(info.groups * 32)
        changed = bytearray(digests)
        for group in random.integers(0, info.groups, min(4, info.groups)):
            changed[int(group) * 32] ^= 1
        old.append(TensorManifest(info, digests))
        new.append(TensorManifest(info, bytes(changed)))
    manifests = [Manifest.of(old), Manifest.of(new)]
    models = [Model(Identity("00" * 32, "11" * 32, m.root), m, layout, "/m") for m in manifests]
    raw = manifests[1].serialise()

    def plan() -> None:
        parsed, _ = Manifest.parse(directory, raw)
        target = Model(Identity("00" * 32, "11" * 32, parsed.root), parsed, layout, "/m")
        assert plan_transition(models[0], target, 1, Policy()).groups > 0

    return {"groups": manifests[0].groups, "plan_8b_ms": median_ms(plan)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = against_blake3(options.checkpoint.resolve(), options.threads)
    with tempfile.TemporaryDirectory() as name:
        figures |= synthetic_plan(Path(name))
    for key, value in figures.items():
        print(f"  {key:<24}{value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
