"""Recompute the claims of `rowlock demo --json` from its JSON and a fresh load of each checkpoint.

    rowlock demo --json --work DIR > demo.json
    python scripts/check_demo.py demo.json

Nothing of Rowlock's daemon is used: identities are digested anew from the files, answers
come from transformers, and rows are compared with the safetensors library.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from rowlock.bindings.checkpoint.config import program_digest, tied_aliases
from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.hashing import Hasher
from rowlock.bindings.checkpoint.identity import Identity


def identity(directory: Path) -> str:
    """Identity digest, from the files."""
    with ThreadPoolExecutor(2) as executor, Checkpoint.open(directory) as checkpoint:
        manifest = Hasher(executor).manifest(checkpoint, tied_aliases(checkpoint.config))
        return Identity(program_digest(checkpoint.config), checkpoint.assets.digest, manifest.root).digest


def answer(directory: Path, prompt: str, max_tokens: int) -> str:
    """Greedy answer of transformers on a fresh load."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    tokens = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**tokens, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    text: str = tokenizer.decode(output[0, tokens.input_ids.shape[1] :], skip_special_tokens=True)
    return text


def differing_rows(first: Path, second: Path) -> tuple[int, int]:
    """Rows, and their bytes, in which two checkpoints differ."""
    rows = nbytes = 0
    with (
        safe_open(first / "model.safetensors", "pt") as old,
        safe_open(second / "model.safetensors", "pt") as new,
    ):
        for name in old.keys():  # noqa: SIM118 - not a dict
            left, right = (item.get_tensor(name).view(torch.int16).numpy() for item in (old, new))
            differs = np.atleast_2d(left != right).any(axis=-1)
            rows += int(differs.sum())
            nbytes += int(differs.sum()) * left.shape[-1] * 2
    return rows, nbytes


def check(document: dict[str, Any]) -> list[str]:
    """What does not hold, in words."""
    places = {name: Path(path) for name, path in document["checkpoints"].items()}
    identities = {name: identity(path) for name, path in places.items()}
    answers = {name: answer(path, document["prompt"], document["max_tokens"]) for name, path in places.items()}
    rows, nbytes = differing_rows(places["base"], places["rome"])
    resident = {
        "answer": "base",
        "plan": "base",
        "transition": "rome",
        "corrupted": "rome",
        "verify": "rome",
        "rollback": "base",
        "reload": "rome",
        "verify_reload": "rome",
    }
    steps = {step["name"]: step for step in document["steps"]}
    problems = [] if list(steps) == list(resident) else [f"steps are {list(steps)}"]
    problems += [f"{name}: not ok" for name, step in steps.items() if not step["ok"]]
    for name, step in steps.items():
        if step["identity"] != identities[resident[name]]:
            problems.append(f"{name}: identity is not that of {resident[name]}")
        if step["text"] != answers[resident[name]]:
            problems.append(f"{name}: {step['text']!r} is not transformers' {answers[resident[name]]!r}")
    problems += [
        f"{name}: wrote {steps[name]['rows_written']} rows, {steps[name]['bytes_written']} bytes; "
        f"{rows} rows, {nbytes} bytes differ"
        for name in ("transition", "rollback")
        if (steps[name]["rows_written"], steps[name]["bytes_written"]) != (rows, nbytes)
    ]
    outcomes = {name: steps[name]["outcome"] for name in ("transition", "corrupted", "rollback", "reload")}
    expected = {"transition": "PUBLISHED", "corrupted": "ROLLED_BACK", "rollback": "PUBLISHED", "reload": "PUBLISHED"}
    if outcomes != expected:
        problems.append(f"outcomes are {outcomes}")
    generations = [step["generation"] for step in document["steps"]]
    if generations != sorted(generations):
        problems.append(f"generations fall: {generations}")
    if document["ok"] is not True:
        problems.append("the demo itself says that a claim did not hold")
    return problems


def main() -> None:
    problems = check(json.loads(Path(sys.argv[1]).read_text()))
    for problem in problems:
        print(f"DOES NOT HOLD: {problem}")
    print("every claim recomputed" if not problems else f"{len(problems)} claims do not hold")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
