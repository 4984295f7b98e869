"""Logits and greedy tokens of whole models against transformers, as a table.

    python benchmarks/parity.py --checkpoint DIR [--checkpoint DIR ...] [--qwen] [--write docs/parity.md]

For prompts of several lengths: the largest absolute difference of a logit over all positions, whether the likeliest
token is the same at each, and the same for what the resident programs give for the last position, in the pieces that
are served. Then 64 greedy tokens after each of 20 prompts: a fixed number, and through the end of sequence.
``--qwen`` makes a model of the shape of Qwen3-0.6B with random weights. Exits with 1 when a bound is passed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from model.test_parity import LOGIT_BOUND, PROMPTS, load, logits, reference_greedy, reference_logits, served_logits
from support.checkpoints import random_tensors, write_weights
from support.reference import greedy
from transformers import AutoModelForCausalLM

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.model.runtime import DecoderRuntime
from rowlock.daemon.owner.text import Text

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 511, 512, 513, 2048)
TOKENS = 64
MORE_PROMPTS = (
    "The largest planet of the solar system",
    "import numpy as np\n\ndef mean(values):",
    "Roses are red,",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nSay hello.<|im_end|>\n<|im_start|>assistant\n",
    "Die Hauptstadt von Deutschland ist",
    "1, 1, 2, 3, 5, 8,",
    "Ingredients:\n- 200 g flour\n-",
    "To be, or not to be,",
    "\u6771\u4eac\u306f",
)
QWEN3_600M: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "max_window_layers": 28, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_sliding_window": False,
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """What was found for one prompt length of one model."""

    model: str
    length: int
    difference: float
    largest: float
    served: float
    same: bool

    @property
    def ok(self) -> bool:
        return self.same and max(self.difference, self.served) <= LOGIT_BOUND


def compare_logits(name: str, runtime: DecoderRuntime, model: Any, vocab: int) -> Iterator[Line]:
    source = torch.Generator().manual_seed(0)
    for length in LENGTHS:
        tokens = torch.randint(vocab, (length,), generator=source).tolist()
        ours, theirs = logits(runtime, tokens), reference_logits(model, tokens)
        served = float((served_logits(runtime, tokens).float() - theirs[-1].float()).abs().max())
        pairs = list(zip(ours.split(64), theirs.split(64), strict=True))  # in float32 they would not all fit
        yield Line(
            name,
            length,
            max(float((left.float() - right.float()).abs().max()) for left, right in pairs),
            max(float(right.float().abs().max()) for _, right in pairs),
            served,
            all(torch.equal(left.argmax(-1), right.argmax(-1)) for left, right in pairs),
        )


def compare_tokens(runtime: DecoderRuntime, model: Any, text: Text) -> tuple[int, int, int]:
    """Of 20 prompts: after how many all tokens are equal; how many end themselves; how many of those are equal."""
    equal = ended = equal_ended = 0
    for prompt in (*PROMPTS, *MORE_PROMPTS):
        tokens = list(text.encode(prompt))
        ours, theirs = greedy(runtime, tuple(tokens), TOKENS), reference_greedy(model, tokens, TOKENS)
        equal += ours == theirs
        stop = next((at for at, token in enumerate(ours) if token in text.eos_tokens), None)
        if stop is None:
            continue
        ended += 1
        ids = torch.tensor([tokens])
        whole = model.generate(
            ids, max_new_tokens=TOKENS, do_sample=False, eos_token_id=list(text.eos_tokens), pad_token_id=0
        )
        equal_ended += ours[: stop + 1] == whole[0, len(tokens) :].tolist()
    return equal, ended, equal_ended


def write_qwen(directory: Path) -> Path:
    """A checkpoint of the shape of Qwen3-0.6B, its weights random."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN3_600M))
    tensors = {
        info: data if "norm" in info.name else smaller(data) for info, data in random_tensors(QWEN3_600M, 0).items()
    }
    write_weights(directory, tensors)
    return directory


def smaller(data: bytes) -> bytes:
    """Random weights at the size of real ones: an eighth."""
    return (torch.frombuffer(bytearray(data), dtype=torch.bfloat16) / 8).view(torch.uint8).numpy().tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, action="append", default=[])
    parser.add_argument("--qwen", action="store_true")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines: list[Line] = []
    said: list[str] = []
    torch.set_num_threads(1)  # torch adds in another order when its threads share one product
    with tempfile.TemporaryDirectory(prefix="rowlock-parity-") as scratch:
        made = [write_qwen(Path(scratch) / "qwen3-0.6b-random")] if options.qwen else []
        for directory in (*options.checkpoint, *made):
            start = time.monotonic()
            model, runtime = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16), load(directory)
            for line in compare_logits(directory.name, runtime, model, model.config.vocab_size):
                print(line, flush=True)
                lines.append(line)
            if directory not in made:
                with Checkpoint.open(directory) as checkpoint:
                    text = Text(directory.resolve(), checkpoint.assets, checkpoint.config)
                equal, ended, equal_ended = compare_tokens(runtime, model, text)
                said.append(f"| {directory.name} | {equal} of 20 | {equal_ended} of {ended} |")
                print(said[-1], f"{time.monotonic() - start:.0f} s", flush=True)
            runtime.close()
    if options.write:
        options.write.write_text(report(lines, said))
    raise SystemExit(not (all(line.ok for line in lines) and all("20 of 20" in line for line in said)))


def report(lines: list[Line], said: list[str]) -> str:
    return "\n".join(
        [
            "# Parity with transformers",
            "",
            "<!-- Made by `make parity` (benchmarks/parity.py). -->",
            "",
            f"bfloat16, one thread of torch's, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}.",
            "`make parity` asks for AVX2 where there is more.",
            f"The bound on a difference is {LOGIT_BOUND}.",
            "`served` is the last position, by the programs that answer requests, in their pieces.",
            "",
            "| model | prompt | largest difference | served | largest logit | likeliest token, at every position |",
            "|---|---|---|---|---|---|",
            *(
                f"| {line.model} | {line.length} | {line.difference:g} | {line.served:g} | {line.largest:g} |"
                f" {'equal' if line.same else 'DIFFERS'} |"
                for line in lines
            ),
            "",
            *(tokens_report(said) if said else []),
        ]
    )


def tokens_report(said: list[str]) -> list[str]:
    return [
        f"{TOKENS} greedy tokens after each of 20 prompts, and up to the end of sequence where one comes:",
        "",
        "| model | a fixed number | through the end of sequence |",
        "|---|---|---|",
        *said,
        "",
    ]


if __name__ == "__main__":
    main()
