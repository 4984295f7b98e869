"""What clients see of a whole-model B2: tokens per second while it stages, gaps, and the pause.

    python benchmarks/pause.py --checkpoint DIR [--clients 4] [--tokens 32] [--runs 5] [--json FILE]

Clients ask for one answer of so many tokens after another, as streams: with few of them the gaps contain
prompts, and all the way from one answer to the next question; with many, steps of decoding alone. Each run
measures them idle for a while, then moves the owner to a target in which every row differs.

- *rate*: tokens per second of all clients together, while it stages (from the call to the
  JOURNALED event, before requests give way) and idle.
- *gap*: the longest time in which no client got a token, in the same windows, which are of about the same length, since
  the longest of more is longer; *p99*: 99 % of these times are shorter; *own gap*: the longest between two tokens of
  one answer.
- *drain_ms*, *exclusive_ms*, *blocked_ms*: from the record. *seen_ms*: the longest time
  without any token from JOURNALED to the first token of the new identity.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from transition import every_row

from rowlock.cli.client import Client
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import inference_pb2, owner_pb2

PROMPT = "Once upon a time"
IDLE_S = 10.0
STEP_MS = 5.0
"""Tokens of one step arrive within this of each other; what is longer is between two steps."""


@dataclass
class Asker(threading.Thread):
    """One client; ``answers`` holds the arrival times of each answer's tokens, and its identity."""

    endpoint: str
    stop: threading.Event
    tokens: int
    answers: list[tuple[str, list[float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        client = Client(self.endpoint, None)
        while not self.stop.is_set():
            request = inference_pb2.GenerateRequest(prompt=PROMPT, max_tokens=self.tokens, ignore_eos=True)
            times: list[float] = []
            identity = ""
            for message in client.stream(client.inference.Generate, request):
                identity = message.identity.digest
                if message.tokens:
                    times.append(time.time())
            self.answers.append((identity, times))
        client.close()


def longest_gap_ms(times: list[float], start: float, stop: float) -> float:
    inside = [start, *(moment for moment in times if start < moment < stop), stop]
    return max(after - before for before, after in itertools.pairwise(inside)) * 1000


def step_p99_ms(times: list[float], start: float, stop: float) -> float:
    """Of the times between tokens of different steps."""
    inside = [moment for moment in times if start < moment < stop]
    steps = [gap for before, after in itertools.pairwise(inside) if (gap := (after - before) * 1000) > STEP_MS]
    return statistics.quantiles(steps, n=100)[-1]


def one_run(daemon: DaemonProcess, target: Path, clients: int, tokens: int) -> dict[str, float]:
    stop = threading.Event()
    askers = [Asker(daemon.client.endpoint, stop, tokens) for _ in range(clients)]
    for asker in askers:
        asker.start()
    time.sleep(1.0)  # warm
    idle_start = time.time()
    time.sleep(IDLE_S)
    begin = time.time()
    request = owner_pb2.TransitionRequest(target=str(target), require=owner_pb2.REQUIRE_B2)
    events = [item.event for item in daemon.client.stream(daemon.client.owner.Transition, request)]
    record = events[-1].record
    assert record.state == owner_pb2.TRANSITION_STATE_PUBLISHED, record.message
    # requests give way from just before JOURNALED is durable
    journaled = next(e for e in events if e.state == owner_pb2.TRANSITION_STATE_JOURNALED).time.ToMicroseconds() / 1e6
    time.sleep(1.0)
    stop.set()
    for asker in askers:
        asker.join()
    answers = [answer for asker in askers for answer in asker.answers]
    times = sorted(moment for _, moments in answers for moment in moments)
    after = min(moments[0] for identity, moments in answers if identity == record.to.digest)
    own = [(late, late - early) for _, moments in answers for early, late in itertools.pairwise(moments)]

    def rate(start: float, end: float) -> float:
        return sum(start <= moment < end for moment in times) / (end - start)

    return {
        "idle_rate": rate(idle_start, begin),
        "staging_rate": rate(begin, journaled),
        "kept": rate(begin, journaled) / rate(idle_start, begin),
        "staging_s": journaled - begin,
        "idle_gap_ms": longest_gap_ms(times, idle_start, begin),
        "staging_gap_ms": longest_gap_ms(times, begin, journaled),
        "idle_p99_ms": step_p99_ms(times, idle_start, begin),
        "staging_p99_ms": step_p99_ms(times, begin, journaled),
        "idle_own_gap_ms": max(gap for at, gap in own if idle_start < at < begin) * 1000,
        "staging_own_gap_ms": max(gap for at, gap in own if begin < at < journaled) * 1000,
        "drain_ms": record.drain_ms,
        "exclusive_ms": record.exclusive_ms,
        "blocked_ms": record.blocked_ms,
        "seen_ms": longest_gap_ms(times, journaled, after),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rowlock-bench-") as name:
        work, base = Path(name), options.checkpoint.resolve()
        every = every_row(base, work / "every")
        arguments = ["--checkpoint", str(base), "--threads", str(options.threads)]
        runs = []
        with DaemonProcess(work / "state", arguments) as daemon:
            for index in range(options.runs + 1):
                result = one_run(daemon, (every, base)[index % 2], options.clients, options.tokens)
                if index:  # the first makes the manifests
                    runs.append(result)
    medians = {key: round(statistics.median(run[key] for run in runs), 2) for key in runs[0]}
    print(f"{options.clients} clients, answers of {options.tokens} tokens, whole-model B2, medians of {len(runs)} runs")
    for key, value in medians.items():
        spread = sorted(run[key] for run in runs)
        print(f"  {key:<20}{value:>10.2f}   ({spread[0]:.2f} to {spread[-1]:.2f})")
    if options.json:
        options.json.write_text(json.dumps({"medians": medians, "runs": runs}, indent=2) + "\n")


if __name__ == "__main__":
    main()
