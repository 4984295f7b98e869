"""Remote prefill: whole results, streamed spans, and the same spans announced at the end.

    python benchmarks/prefill.py --checkpoint DIR --json FILE [--runs 3] [--prompts 512 2048] [--requests 1 4]
                                 [--slots 8] [--pace-ms 0] [--layers 3] [--tokens 16]

One daemon and one source for each arm, on one thread each; the arms alternate in each run, so that whatever else the
machine does falls on all of them. With --pace-ms the source takes that long for each layer and computes nothing: it
stands for another device, and its answers mean nothing. The pool has room for the largest run and one prompt more, and
is used once before anything is measured: fresh memory would be measured otherwise. Raw records go to FILE as JSON
Lines: what was planned, each request, each import, and for each run the prompt tokens that the daemon counted and the
speed of memcpy at that moment. benchmarks/prefill_summary.py checks them, and makes every figure from them.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from rowlock.cli.client import Client
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import inference_pb2, owner_pb2

ARMS = ("whole", "stream", "deferred")
COPY_BYTES = 64 * 1024 * 1024


def pool_bytes(options: argparse.Namespace) -> int:
    """K/V of the largest run, and of one prompt more."""
    model = json.loads((options.checkpoint / "config.json").read_text())
    head_dim = model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"]
    token = model["num_hidden_layers"] * 2 * model["num_key_value_heads"] * head_dim * 2
    nbytes: int = token * (max(options.requests) + 1) * (max(options.prompts) + options.tokens + 64)
    return nbytes


def config(path: Path, arm: str, options: argparse.Namespace) -> Path:
    pool = pool_bytes(options)
    lines = [
        '[prefill]\nsource = "subprocess"\nthreads = 1\nsilence_s = 3600',  # a paced one computes a prompt in one go
        f"[serving]\nslots = {options.slots}\ncache_bytes = {pool}",
    ]
    if arm != "whole":
        lines[0] += f"\nstream_layers = {options.layers}"
    if arm == "deferred":
        lines[0] += "\ndeferred = true"
    if options.pace_ms:
        lines[0] += f"\npace_ms = {options.pace_ms}"
    path.write_text("\n".join(lines) + "\n")
    return path


def memcpy_gb_s() -> float:
    """Warm copies of what does not fit in a cache: the best of a few."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.ones(COPY_BYTES, np.uint8)
    best = min(_timed(lambda: np.copyto(target, source)) for _ in range(5))
    return COPY_BYTES / best / 1e9


def _timed(job: Any) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


class Asker(threading.Thread):
    """One request, from its call to its last token."""

    def __init__(self, endpoint: str, prompt: list[int], tokens: int) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._prompt = prompt
        self._tokens = tokens
        self.prompt_tokens = 0
        self.answer: list[int] = []
        self.times: list[float] = []

    def run(self) -> None:
        client = Client(self._endpoint, None)
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=self._prompt), max_tokens=self._tokens, ignore_eos=True
        )
        self.start_time = time.perf_counter()
        for message in client.stream(client.inference.Generate, request):
            self.prompt_tokens = message.prompt_tokens or self.prompt_tokens
            if message.tokens:
                self.times.append(time.perf_counter())
                self.answer += message.tokens
        client.close()


class Log:
    """What the daemon says of its imports."""

    def __init__(self, path: Path) -> None:
        self._file = open(path)  # noqa: SIM115 - closed with the process

    def imports(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        return [json.loads(line) for line in self._file if "prefill.imported" in line]


def prompts_of(seed: str, count: int, length: int, vocab: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(vocab) for _ in range(length)] for _ in range(count)]


def ask_all(daemon: DaemonProcess, prompts: list[list[int]], tokens: int) -> list[Asker]:
    askers = [Asker(daemon.client.endpoint, prompt, tokens) for prompt in prompts]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
        assert len(asker.answer) == tokens, "a request failed; the daemon's log says why"
    return askers


def prompt_tokens(daemon: DaemonProcess) -> int:
    """What it has counted since it started."""
    served = daemon.client.call(daemon.client.owner.Describe, owner_pb2.DescribeRequest()).served
    return int(served.prompt_tokens)


def wait_for_source(daemon: DaemonProcess) -> None:
    while True:
        owner = daemon.client.call(daemon.client.owner.GetOwner, owner_pb2.GetOwnerRequest()).owner
        if owner.source.state == "READY":
            return
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16)
    options = parser.parse_args()
    context = json.loads((options.checkpoint / "config.json").read_text())["max_position_embeddings"]
    if options.tokens < 3 or max(options.prompts) + options.tokens > context:
        parser.error(f"--tokens: at least 3, and with the longest of --prompts at most {context}, the model's context")
    plan = {name: getattr(options, name) for name in ("slots", "pace_ms", "layers", "tokens", "runs")}
    plan |= {"model": options.checkpoint.name, "prompts": options.prompts, "all_requests": options.requests}
    with ExitStack() as closing, open(options.json, "a") as out:
        print(json.dumps({"kind": "plan", **plan}), file=out, flush=True)
        work = Path(closing.enter_context(tempfile.TemporaryDirectory()))
        daemons, logs = {}, {}
        for arm in ARMS:
            state = work / arm
            settings = config(work / f"{arm}.toml", arm, options)
            arguments = ["--config", str(settings), "--checkpoint", str(options.checkpoint), "--threads", "1"]
            daemons[arm] = closing.enter_context(DaemonProcess(state, arguments))
            wait_for_source(daemons[arm])
            logs[arm] = Log(state / "daemon.log")
        for length in sorted(options.prompts, reverse=True):  # the longest prompts use the whole pool once
            for arm in ARMS:
                for prompt in prompts_of(f"warm {length}", max(options.requests) + 1, length, 250):
                    ask_all(daemons[arm], [prompt], options.tokens)
                logs[arm].imports()
            for requests in options.requests:
                for run in range(options.runs):
                    for record in one_run(daemons, logs, options, length, requests, run):
                        print(json.dumps(record), file=out, flush=True)


def one_run(
    daemons: dict[str, DaemonProcess], logs: dict[str, Log], options: argparse.Namespace, length: int, requests: int,
    run: int,
) -> list[dict[str, Any]]:  # fmt: skip
    scenario = {
        "model": options.checkpoint.name, "prompt": length, "requests": requests, "slots": options.slots,
        "pace_ms": options.pace_ms, "layers": options.layers, "tokens": options.tokens, "run": run,
        "runs": options.runs,
    }  # fmt: skip
    records: list[dict[str, Any]] = [{"kind": "memcpy", **scenario, "gb_s": memcpy_gb_s()}]
    arms = [*ARMS[run % len(ARMS) :], *ARMS[: run % len(ARMS)]]
    for place, arm in enumerate(arms):
        prompts = prompts_of(f"{length} {requests} {run}", requests, length, 250)
        before = prompt_tokens(daemons[arm])
        start = time.perf_counter()
        askers = ask_all(daemons[arm], prompts, options.tokens)
        wall = time.perf_counter() - start
        imports = logs[arm].imports()
        assert len(imports) == requests, f"{len(imports)} imports of {requests} requests were logged"
        where = {**scenario, "arm": arm, "place": place}
        records.append({"kind": "run", **where, "all_prompt_tokens": prompt_tokens(daemons[arm]) - before})
        for index, asker in enumerate(askers):
            times = [moment - asker.start_time for moment in asker.times]
            answer = {"answer": asker.answer, "token_s": times, "wall_s": wall, "prompt_tokens": asker.prompt_tokens}
            records.append({"kind": "request", **where, "index": index, **answer})
        for index, found in enumerate(imports):
            figures = {key: value for key, value in found.items() if isinstance(value, int)}
            records.append({"kind": "import", **where, "index": index, **figures})
    return records


if __name__ == "__main__":
    main()
