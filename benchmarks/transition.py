"""B2 against B1 and against transformers' ``from_pretrained`` of the same target.

    python benchmarks/transition.py --checkpoint DIR [--runs 5] [--json FILE]

The clock runs from the call that plans to the first token of the next answer. For B2 and B1
it contains: planning, staging (the whole target is read and digested), undo, drain, device
writes, readback, the durable publish, tokenising, prefill. For transformers it contains:
dropping the old model, ``from_pretrained``, tokenising, prefill; nothing is verified.
Manifests are cached: the one smoke round, which is excluded, makes them. Arms alternate
within a round. Before each arm a gigabyte is touched and freed, so that fresh memory costs all
of them the same. Medians and inclusive interquartile ranges.
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
from limits import durable_write_ms, hold_memory, measure_limits, too_slow
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.cli.client import Client
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.cli.demo_targets import exchanged
from rowlock.v1 import inference_pb2, owner_pb2

Arm = Callable[[Path], dict[str, float]]
DURABLE = "durable write"
HELD_BYTES = 1 << 30
"""More than any arm needs of fresh memory."""
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

    def to(
        self,
        target: Path,
        require: owner_pb2.Require.ValueType,
        verify: owner_pb2.VerifyMode.ValueType = owner_pb2.VERIFY_MODE_PARENTS,
    ) -> dict[str, float]:
        owner, start = self._client.owner, time.perf_counter()
        options = owner_pb2.TransitionOptions(verify=verify)
        asked = owner_pb2.PlanRequest(target=str(target), require=require, options=options)
        plan = self._client.call(owner.Plan, asked).plan
        planned = time.perf_counter()
        request = owner_pb2.TransitionRequest(
            target=str(target), require=require, plan_digest=plan.digest, options=options
        )
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


def alternate(arms: dict[str, Arm], targets: list[Path], runs: int) -> dict[str, list[dict[str, float]]]:
    """One excluded smoke round, then ``runs`` rounds; the order of the arms turns with the round."""
    results: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    names = list(arms)
    position = dict.fromkeys(arms, 0)
    shared = 0
    for round_number in range(runs + 1):
        for name in names[round_number % len(names) :] + names[: round_number % len(names)]:
            hold_memory(HELD_BYTES)
            if name in {"transformers", DURABLE}:
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


def against_floors(
    figures: dict[str, dict[str, dict[str, float]]], limits: dict[str, float], nbytes: int, *, every: bool
) -> dict[str, float]:
    """How far whole-model transitions are from the sum of what they cannot do without."""

    def ms(limit: str, times: float = 1) -> float:
        return times * nbytes / 1e6 / limits[limit]

    ratios = {}
    if every:
        pause = ms("copy", 2) + ms("compare")
        floor = ms("read_fresh") + ms("blake3", 2) + ms("copy_fresh") + pause
        if figures["B2"].get("undo_file_ms", {"median": 0.0})["median"]:
            # measured between the transitions: a disk that has just written a lot is slower
            floor += figures[DURABLE]["first_token_ms"]["median"]
        ratios["B2 total"] = round(figures["B2"]["transition_ms"]["median"] / floor, 2)
        ratios["B2 exclusive"] = round(figures["B2"]["exclusive_ms"]["median"] / pause, 2)
    if "B1" in figures:
        floor = ms("read_fresh") + ms("blake3") + ms("copy_fresh")
        ratios["B1 total"] = round(figures["B1"]["transition_ms"]["median"] / floor, 2)
    return ratios


def spread(figure: dict[str, float]) -> str:
    return f"{figure['median']:.1f} ({figure['q1']:.1f} to {figure['q3']:.1f})"


def show(case: str, arms: dict[str, dict[str, dict[str, float]]], floors: dict[str, float]) -> None:
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
    if ratios:
        print("  B2 : " + " : ".join(ratios) + " = 1 : " + " : ".join(f"{ratio:.2f}" for ratio in ratios.values()))
    phases = [key for key in arms["B2"] if key.endswith("_ms") and key not in {"first_token_ms", "transition_ms"}]
    print("  B2 phases, ms: " + ", ".join(f"{key[:-3]} {arms['B2'][key]['median']:.1f}" for key in phases))
    if floors:
        print("  times the sum of the floors: " + ", ".join(f"{key} {value:.2f}" for key, value in floors.items()))


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
        document = run(Path(name), options.checkpoint.resolve(), options.threads, options.runs)
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if document["too_slow"]:
        raise SystemExit(f"this machine is far below its usual range: {', '.join(document['too_slow'])}")


def run(work: Path, base: Path, threads: int, runs: int) -> dict[str, Any]:
    rows, every = exchanged(base, work / "rows", "ĠParis", "ĠRome"), every_row(base, work / "every")
    weights = base / "model.safetensors"
    size = weights.stat().st_size
    limits = {**measure_limits(weights, threads), "durable": round(size / 1e6 / durable_write_ms(work, size), 2)}
    document: dict[str, Any] = {"threads": threads, "limits_gb_s": limits, "too_slow": too_slow(limits), "cases": {}}
    print("limits, GB/s: " + ", ".join(f"{key} {value}" for key, value in limits.items()))
    b1, b2 = owner_pb2.REQUIRE_B1, owner_pb2.REQUIRE_B2
    other = Transformers(AutoTokenizer.from_pretrained(base))

    def case(name: str, arms: dict[str, Arm], targets: list[Path]) -> None:
        results = alternate(arms, targets, runs)
        figures = summarise(results)
        ratios = against_floors(figures, limits, weights.stat().st_size, every=targets[1] == every)
        document["cases"][name] = {"summary": figures, "runs": results, "against_floors": ratios}
        show(name, figures, ratios)

    arguments = ["--checkpoint", str(base), "--threads", str(threads)]
    with DaemonProcess(work / "state", arguments) as daemon:
        owner = Rowlock(daemon.client)
        arms: dict[str, Arm] = {
            "B2": lambda target: owner.to(target, b2),
            "B1": lambda target: owner.to(target, b1),
            "transformers": other.to,
        }
        groups: Arm = lambda target: owner.to(target, b2, owner_pb2.VERIFY_MODE_GROUPS)  # noqa: E731
        case("two rows", {**arms, "B2 groups": groups}, [base, rows])
        owner.to(base, b1)
        case("every row, undo in memory", arms, [base, every])
    config = work / "durable.toml"
    config.write_text("[transition]\nundo_durable_max = 100_000_000_000\n")
    with DaemonProcess(work / "state2", [*arguments, "--config", str(config)]) as daemon:
        durable = Rowlock(daemon.client)
        write: Arm = lambda _target: {"first_token_ms": durable_write_ms(work, weights.stat().st_size)}  # noqa: E731
        case("every row, undo durable", {"B2": lambda target: durable.to(target, b2), DURABLE: write}, [base, every])
    return document


if __name__ == "__main__":
    main()
