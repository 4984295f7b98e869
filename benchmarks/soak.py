"""Sixteen mixed clients, trouble and B2s for minutes: no wrong token, no leak, no unhandled exception, flat memory.

    PYTHONPATH=tests python benchmarks/soak.py --checkpoint DIR [--seconds 600] [--seed 1] [--json FILE]

Clients ask over HTTP (completions and chat, whole and as streams) and gRPC, hang up in the middle, send bad JSON and
prompts that are too long, while the owner moves every few seconds between the checkpoint, one in which the last norm
is negated (one row), and one in which the embedding is (all its rows). Every answer must be what a fresh load of the
identity that it names answers to the same prompt in this process. The exit code is 1 when a law was broken; what was
broken is in the result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from support.checkpoints import EMBED, NORM, change_rows, negate
from support.http import log_lines, url_of
from support.reference import loaded, sampled

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.cpu.binding import CpuBinding
from rowlock.bindings.device import Sampling
from rowlock.cli.client import Client
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.daemon.owner.chat import Conversation, Message
from rowlock.daemon.owner.text import Text
from rowlock.v1 import inference_pb2, owner_pb2

TOKENS = 24
PROMPTS = ("Once upon a time", "The capital of France is", "x", "def add(a, b):", "Zahlen: eins, zwei,", "€ " * 40)
SAMPLINGS = (Sampling(), Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=7))
GROWTH_MAX = 48 * 1024 * 1024
"""Bytes that the resident set may grow by once everything has been used for a while."""
WHOLE_EVERY = 5
"""Of so many B2s one has every byte of its target read; the others read what differs, as who pushes often would."""
WRONG_MAX = 20
"""Wrong answers that are written down in full."""
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Case:
    """Something to ask. ``chat``: as a message of a user, through the chat template."""

    prompt: str
    chat: bool
    sampling: Sampling

    @property
    def fields(self) -> dict[str, object]:
        """Of the HTTP request."""
        asked = {"messages": [{"role": "user", "content": self.prompt}]} if self.chat else {"prompt": self.prompt}
        return {**asked, **vars(self.sampling), "ignore_eos": True}


CASES = [Case(prompt, chat, sampling) for prompt in PROMPTS for chat in (False, True) for sampling in SAMPLINGS]


class Reference:
    """What each identity answers, from a fresh load of its checkpoint in this process."""

    def __init__(self, directories: list[Path]) -> None:
        self._tokens: dict[tuple[str, Case], list[int]] = {}
        for directory in directories:
            with Checkpoint.open(directory) as checkpoint:
                self._text = Text(directory, checkpoint.assets, checkpoint.config)
            binding = CpuBinding(threads=2)
            runtime, identity = loaded(binding, directory), identity_of(directory)
            for case in CASES:
                tokens = sampled(runtime, self.prompt_tokens(case), TOKENS, case.sampling)
                self._tokens[identity, case] = tokens
            binding.close()
        self.identities = sorted({identity for identity, _ in self._tokens})
        for case in CASES:
            answers = {self.expected(item, case, TOKENS, "") for item in self.identities}
            assert len(answers) == len(directories), f"{case}: identities that cannot be told apart"

    def prompt_tokens(self, case: Case) -> tuple[int, ...]:
        prompt = Conversation((Message("user", case.prompt),)) if case.chat else case.prompt
        return self._text.tokens_of(prompt)

    def expected(self, identity: str, case: Case, tokens: int, stop: str) -> tuple[str, str]:
        """Text and finish reason."""
        text = self._text.decode(self._tokens[identity, case][:tokens])
        at = text.find(stop) if stop else -1
        return (text, "length") if at < 0 else (text[:at], "stop")


def identity_of(directory: Path) -> str:
    """The digest that `rowlock manifest` finds in the files."""
    command = [sys.executable, "-m", "rowlock.cli", "manifest", str(directory), "--no-write", "--json", "--quiet"]
    digest: str = json.loads(subprocess.check_output(command))["identity"]["digest"]
    return digest


@dataclass
class Asker(threading.Thread):
    """One client, which asks until the end; ``seed`` decides what."""

    url: str
    endpoint: str
    reference: Reference
    seed: int
    stop: threading.Event
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, object]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._random = random.Random(self.seed)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        self._client, self._http = Client(self.endpoint, TIMEOUT_S), httpx.Client(timeout=TIMEOUT_S, base_url=self.url)
        kinds = [self.whole, self.streamed, self.grpc_answer, self.hung_up, self.hung_up_grpc, self.trouble]
        while not self.stop.is_set():
            kind = self._random.choices(kinds, [30, 25, 25, 8, 4, 8])[0]
            self.counts[kind.__name__] += 1
            try:
                kind()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no answer
                self._broken(kind.__name__, repr(error))
        self._client.close()
        self._http.close()

    def whole(self) -> None:
        case, tokens, stop = self._choose()
        answer = self._http.post(_path(case), json=_asked(case, tokens, stop))
        answer.raise_for_status()
        body, choice = answer.json(), answer.json()["choices"][0]
        text = choice["message"]["content"] if case.chat else choice["text"]
        self._judge(case, tokens, stop, body["system_fingerprint"], text, choice["finish_reason"])

    def streamed(self) -> None:
        case, tokens, stop = self._choose()
        text, finish, identities = "", "", set()
        with self._stream(case, tokens, stop) as answer:
            answer.raise_for_status()
            identities.add(answer.headers["x-rowlock-identity"])
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    identities.add(chunk["system_fingerprint"])
                    (choice,) = chunk["choices"]
                    text += choice["delta"].get("content", "") if case.chat else choice["text"]
                    finish = choice["finish_reason"] or finish
        (identity,) = identities
        self._judge(case, tokens, stop, identity, text, finish)

    def grpc_answer(self) -> None:
        case, tokens, stop = self._choose()
        messages = list(self._client.inference.Generate(self._message(case, tokens, stop), timeout=TIMEOUT_S))
        finish = inference_pb2.FinishReason.Name(messages[-1].finish_reason).removeprefix("FINISH_REASON_").lower()
        (identity,) = {message.identity.digest for message in messages}
        self._judge(case, tokens, stop, identity, "".join(message.text for message in messages), finish)

    def hung_up(self) -> None:
        """A stream that nobody reads to its end."""
        case, _, _ = self._choose()
        events = self._random.randrange(6)
        with self._stream(case, 1000, "") as answer:
            for _line, _ in zip(answer.iter_lines(), range(events), strict=False):
                pass

    def hung_up_grpc(self) -> None:
        case, _, _ = self._choose()
        call = self._client.inference.Generate(self._message(case, 1000, ""), timeout=TIMEOUT_S)
        for _message, _ in zip(call, range(self._random.randrange(6)), strict=False):
            pass
        call.cancel()

    def trouble(self) -> None:
        """What has to be refused, and how."""
        refused = {
            b'{"prompt": "x", ': 400,
            b'{"prompt": "x", "max_tokenz": 1}': 400,
            b'{"prompt": "x", "max_tokens": 1000000}': 400,
            json.dumps({"prompt": [1] * 100_000}).encode(): 400,
            b'"' + b"x" * 4_200_000 + b'"': 413,
            b"\xff": 400,
        }
        content, status = self._random.choice(list(refused.items()))
        headers = {"content-type": "application/json"}
        answer = self._http.post("/v1/completions", content=content, headers=headers)
        if answer.status_code != status:
            self._broken("trouble", f"{content[:40]!r} was answered with {answer.status_code}, not {status}")

    def _choose(self) -> tuple[Case, int, str]:
        """What to ask, how many tokens of it, and perhaps a stop string out of an answer."""
        case, tokens, stop = self._random.choice(CASES), self._random.randint(1, TOKENS), ""
        if self._random.random() < 0.3:
            text, _ = self.reference.expected(self._random.choice(self.reference.identities), case, TOKENS, "")
            at = self._random.randrange(len(text))
            stop = text[at : at + self._random.randint(1, 4)]
        return case, tokens, stop

    def _stream(self, case: Case, tokens: int, stop: str):  # type: ignore[no-untyped-def]
        asked = _asked(case, tokens, stop)
        return self._http.stream("POST", _path(case), json={**asked, "stream": True})

    def _message(self, case: Case, tokens: int, stop: str) -> inference_pb2.GenerateRequest:
        return inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenIds(ids=self.reference.prompt_tokens(case)), max_tokens=tokens, ignore_eos=True,
            stop=[stop] if stop else [], **vars(case.sampling),
        )  # fmt: skip

    def _judge(self, case: Case, tokens: int, stop: str, identity: str, text: str, finish: str) -> None:
        expected = self.reference.expected(identity, case, tokens, stop)
        self.counts[f"answered by {identity[:12]}"] += 1
        if (text, finish) != expected:
            self._broken("wrong answer", f"{case}, {tokens} tokens, stop {stop!r}: {(text, finish)}, not {expected}")

    def _broken(self, what: str, how: str) -> None:
        self.counts["broken"] += 1
        if len(self.wrong) < WRONG_MAX:
            self.wrong.append({"what": what, "how": how, "seed": self.seed})


def _path(case: Case) -> str:
    return "/v1/chat/completions" if case.chat else "/v1/completions"


def _asked(case: Case, tokens: int, stop: str) -> dict[str, object]:
    return {**case.fields, "max_tokens": tokens, **({"stop": stop} if stop else {})}


@dataclass
class Watched:
    """The daemon beside its clients: transitions, and its resident set."""

    transitions: list[float] = field(default_factory=list)
    resident_set: list[tuple[float, int]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    def move(self, client: Client, target: Path, *, whole: bool) -> None:
        check = owner_pb2.TARGET_CHECK_WHOLE if whole else owner_pb2.TARGET_CHECK_STAGED
        request = owner_pb2.TransitionRequest(
            target=str(target), require=owner_pb2.REQUIRE_B2, options=owner_pb2.TransitionOptions(target_check=check)
        )
        record = [item.event for item in client.stream(client.owner.Transition, request)][-1].record
        if record.state != owner_pb2.TRANSITION_STATE_PUBLISHED:
            self.broken.append(f"a B2 ended as {record.state}: {record.message}")
        self.transitions.append(record.exclusive_ms)

    def growth(self, settle_s: float) -> int:
        settled = [rss for at, rss in self.resident_set if at >= settle_s]
        return max(settled) - settled[0] if settled else 0


def run(daemon: DaemonProcess, targets: list[Path], askers: list[Asker], seconds: float, every_s: float) -> Watched:
    """``targets`` in turn, over and over."""
    watched, process, start = Watched(), psutil.Process(daemon.process.pid), time.monotonic()
    turn = itertools.cycle(targets)
    for asker in askers:
        asker.start()
    moved = 0
    try:
        while (now := time.monotonic() - start) < seconds:
            watched.resident_set.append((now, process.memory_info().rss))
            if now >= (moved + 1) * every_s:
                moved += 1
                watched.move(daemon.client, next(turn), whole=moved % WHOLE_EVERY == 0)
            time.sleep(0.25)
    finally:
        for asker in askers:
            asker.stop.set()
        for asker in askers:
            asker.join()
    return watched


def afterwards(daemon: DaemonProcess, url: str) -> list[str]:
    """What must hold once nobody asks any more."""
    client, broken = daemon.client, []
    deadline = time.monotonic() + TIMEOUT_S
    while (owner := client.owner.GetOwner(owner_pb2.GetOwnerRequest()).owner).requests_active + owner.requests_waiting:
        if time.monotonic() > deadline:
            broken.append(f"{owner.requests_active} requests still run, {owner.requests_waiting} wait")
            break
    if not client.owner.Verify(owner_pb2.VerifyRequest()).ok:
        broken.append("resident bytes are not those of the identity")
    if httpx.get(f"{url}/ready").status_code != 200:
        broken.append("the owner is not ready")
    groups = client.owner.Describe(owner_pb2.DescribeRequest()).cache.groups
    broken += [f"pages are left: {group}" for group in groups if group.free + group.cached != group.pages]
    text = daemon.log.read_text()
    errors = [line for line in log_lines(daemon) if line.get("level") == "error"]
    strangers = [line for line in text.splitlines() if line and not line.startswith("{")]
    broken += [f"in the log: {line}" for line in (*errors, *strangers)][:WRONG_MAX]
    return broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="with a chat template")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--every", type=float, default=5, help="seconds between two B2s")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"again: --seed {options.seed} --seconds {options.seconds:g} --clients {options.clients}", flush=True)
    with tempfile.TemporaryDirectory() as work:
        base = options.checkpoint.resolve()
        with Checkpoint.open(base) as checkpoint:
            rows = range(checkpoint.tensors[EMBED].rows)
        small = change_rows(base, Path(work) / "small", NORM, [0], negate)
        large = change_rows(base, Path(work) / "large", EMBED, list(rows), negate)
        reference = Reference([base, small, large])
        arguments = ["--checkpoint", str(base), "--threads", str(options.threads), "--http", "127.0.0.1:0"]
        with DaemonProcess(Path(work) / "state", arguments) as daemon:
            url, stop = url_of(daemon), threading.Event()
            askers = [
                Asker(url, daemon.client.endpoint, reference, options.seed + number, stop)
                for number in range(options.clients)
            ]
            watched = run(daemon, [small, base, large, base], askers, options.seconds, options.every)
            broken = [*watched.broken, *afterwards(daemon, url)]
    growth = watched.growth(min(120, options.seconds / 3))
    if growth > GROWTH_MAX:
        broken.append(f"the resident set grew by {growth} bytes")
    broken += [f"{item['what']}: {item['how']} (client of seed {item['seed']})" for one in askers for item in one.wrong]
    counts: Counter[str] = sum((asker.counts for asker in askers), Counter())
    every = watched.resident_set[:: max(1, len(watched.resident_set) // 20)]
    result = {
        "seed": options.seed,
        "seconds": options.seconds,
        "clients": options.clients,
        "counts": dict(sorted(counts.items())),
        "transitions": len(watched.transitions),
        "exclusive_ms_max": max(watched.transitions, default=0),
        "resident_set_mib": [round(rss / 2**20, 1) for _, rss in every],
        "growth_mib": round(growth / 2**20, 1),
        "broken": broken,
    }
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
