"""B2 against B1 and against transformers' ``from_pretrained`` of the same target.

    python benchmarks/transition.py --checkpoint DIR [--runs 5] [--json FILE]

The clock runs from the call that plans to the first token of the next answer. For B2 and B1
it contains: planning, staging (the whole target is read and digested), undo, drain, device
writes, readback, the durable publish, tokenising, prefill. For transformers it contains:
dropping the old model, ``from_pretrained``, tokenising, prefill; nothing is verified.
Manifests are cached: the one smoke round, which is excluded, makes them. Arms alternate
within a round. Medians and inclusive interquartile ranges.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from limits import measure_durable, measure_limits
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.cli.client import Client
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.cli.demo_targets import exchanged
from rowlock.v1 import inference_pb2, owner_pb2

PROMPT = "The capital of France is"


def every_row(base: Path, directory: Path) -> Path:
    """A copy of a bf16 checkpoint in which one bit of every row is another."""
    exchanged(base, directory, "ĠParis", "ĠRome")
    with Checkpoint.open(directory) as checkpoint:
        extents = list(checkpoint.extents.values())
    data = np.memmap(extents[0].path, np.uint8, "r+")
    for extent in extents:
        data[extent.offset : extent.offset + extent.tensor.nbytes : extent.tensor.row_bytes] ^= 1
    data.flush()
    return directory


class Rowlock:
    """Transitions of a live daemon."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def to(self, target: Path, require: owner_pb2.Require.ValueType) -> dict[str, float]:
        owner, start = self._client.owner, time.perf_counter()
        plan = self._client.call(owner.Plan, owner_pb2.PlanRequest(target=str(target), require=require)).plan
        planned = time.perf_counter()
        request = owner_pb2.TransitionRequest(target=str(target), require=require, plan_digest=plan.digest)
        *_, last = self._client.stream(owner.Transition, request)
        record = last.event.record
        assert last.event.state == owner_pb2.TRANSITION_STATE_PUBLISHED, record.message
        answer = self._client.stream(
            self._client.inference.Generate, inference_pb2.GenerateRequest(prompt=PROMPT, max_tokens=1)
        )
        assert any(message.tokens for message in answer)
        end = time.perf_counter()
        return {
            "first_token_ms": (end - start) * 1000,
            "plan_ms": (planned - start) * 1000,
            "exclusive_ms": record.exclusive_ms,
            "transition_ms": record.total_ms,
            "bytes_written": record.bytes_written,
            "bytes_read_back": record.bytes_read_back,
            **{f"{phase.name}_ms": phase.ms for phase in record.phases},
        }


class Transformers:
    """What one would do without an owner."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._model: Any = None

    def to(self, target: Path) -> dict[str, float]:
        start = time.perf_counter()
        self._model = None
        gc.collect()
        self._model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        tokens = self._tokenizer(PROMPT, return_tensors="pt")
        with torch.inference_mode():
            self._model(**tokens).logits[0, -1].argmax().item()
        return {"first_token_ms": (time.perf_counter() - start) * 1000}


def alternate(
    arms: dict[str, Callable[[Path], dict[str, float]]], targets: list[Path], runs: int
) -> dict[str, list[dict[str, float]]]:
    """One excluded smoke round, then ``runs`` rounds; the order of the arms turns with the round."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    names = list(arms)
    position = dict.fromkeys(arms, 0)
    shared = 0
    for round_number in range(runs + 1):
        for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
            if name == "transformers":
                position[name] += 1
                result = arms[name](targets[position[name] % 2])
            else:
                shared += 1  # both levels move the one owner to and fro
                result = arms[name](targets[shared % 2])
            if round_number > 0:
                results[name].append(result)
    return results


def summary(values: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": round(median, 2), "q1": round(low, 2), "q3": round(high, 2)}


def summarise(results: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    return {name: {key: summary([run[key] for run in runs]) for key in runs[0]} for name, runs in results.items()}


def spread(figure: dict[str, float]) -> str:
    return f"{figure['median']:.1f} ({figure['q1']:.1f} to {figure['q3']:.1f})"


def show(case: str, arms: dict[str, dict[str, dict[str, float]]]) -> None:
    print(f"\n{case}")
    print(f"  {'arm':<14}{'plan to first token, ms':>28}{'exclusive, ms':>22}{'written':>14}{'read back':>14}")
    for name, figures in arms.items():
        line = f"  {name:<14}{spread(figures['first_token_ms']):>28}"
        if "exclusive_ms" in figures:
            written, read = (figures[key]["median"] / 1e6 for key in ("bytes_written", "bytes_read_back"))
            line += f"{spread(figures['exclusive_ms']):>22}{written:>11.3f} MB{read:>11.1f} MB"
        print(line)
    base = arms["B2"]["first_token_ms"]["median"]
    ratios = {name: arms[name]["first_token_ms"]["median"] / base for name in arms if name != "B2"}
    print("  B2 : " + " : ".join(ratios) + " = 1 : " + " : ".join(f"{ratio:.2f}" for ratio in ratios.values()))
    phases = [key for key in arms["B2"] if key.endswith("_ms") and key not in {"first_token_ms", "transition_ms"}]
    print("  B2 phases, ms: " + ", ".join(f"{key[:-3]} {arms['B2'][key]['median']:.1f}" for key in phases))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, help="write every figure there")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="rowlock-bench-") as name:
        work = Path(name)
        base = options.checkpoint.resolve()
        cases = {
            "two rows": exchanged(base, work / "rows", "ĠParis", "ĠRome"),
            "every row": every_row(base, work / "every"),
        }
        weights = base / "model.safetensors"
        limits = {**measure_limits(weights, options.threads), "durable": measure_durable(work)}
        document: dict[str, Any] = {"threads": options.threads, "limits_gb_s": limits, "cases": {}}
        print("limits, GB/s: " + ", ".join(f"{key} {value}" for key, value in limits.items()))
        arguments = ["--checkpoint", str(base), "--threads", str(options.threads)]
        with DaemonProcess(work / "state", arguments) as daemon:
            rowlock, other = Rowlock(daemon.client), Transformers(AutoTokenizer.from_pretrained(base))
            arms: dict[str, Callable[[Path], dict[str, float]]] = {
                "B2": lambda target: rowlock.to(target, owner_pb2.REQUIRE_B2),
                "B1": lambda target: rowlock.to(target, owner_pb2.REQUIRE_B1),
                "transformers": other.to,
            }
            for case, target in cases.items():
                results = alternate(arms, [base, target], options.runs)
                figures = summarise(results)
                document["cases"][case] = {"summary": figures, "runs": results}
                show(case, figures)
                rowlock.to(base, owner_pb2.REQUIRE_B1)
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
