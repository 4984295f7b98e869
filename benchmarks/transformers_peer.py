"""transformers as a server of the benchmarks: one JSON question per line in, the times of its tokens out.

    python benchmarks/transformers_peer.py CHECKPOINT THREADS

Nothing lies between it and the model, which favours it. A question is a batch of prompts of equal length; the
answer has, for each token of the batch, the seconds since the question was read.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor
from transformers.utils import logging


class Clock(LogitsProcessor):  # type: ignore[misc]
    """Notes when the logits of each token come."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.times: list[float] = []

    def __call__(self, _tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.times.append(time.perf_counter() - self.start)
        return scores


def main() -> None:
    checkpoint, threads = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    print("ready", flush=True)
    for line in sys.stdin:
        question, clock = json.loads(line), Clock()
        prompts, count = torch.tensor(question["prompts"]), question["max_tokens"]
        with torch.inference_mode():
            model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                logits_processor=[clock],
            )
        print(json.dumps(clock.times), flush=True)


if __name__ == "__main__":
    main()
