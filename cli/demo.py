"""``rowlock demo``."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from rowlock.cli.client import Client
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.cli.demo_probe import Probe
from rowlock.cli.demo_targets import demo_checkpoint, exchanged
from rowlock.cli.options import Output, output_options
from rowlock.cli.render import level_name, plan_lines, print_json, record_lines, short, state_name
from rowlock.v1 import inference_pb2, owner_pb2

PROMPT: Final = "The capital of France is"
MAX_TOKENS: Final = 8
PARIS, ROME, LONDON = "ĠParis", "ĠRome", "ĠLondon"
FAULT: Final = {"operation": "write", "effect": "flip", "bit": 77}
EXIT_CLAIM_FAILED: Final = 1


@dataclass
class _Step:
    """One step of the demo, as ``--json`` prints it; None where a field does not apply."""

    name: str
    ok: bool = False
    identity: str | None = None
    generation: int | None = None
    text: str | None = None
    level: str | None = None
    rows_written: int | None = None
    bytes_written: int | None = None
    bytes_read_back: int | None = None
    drain_ms: float | None = None
    pause_ms: float | None = None
    exclusive_ms: float | None = None
    usual_gap_ms: float | None = None
    total_ms: float | None = None
    outcome: str | None = None
    claims: dict[str, bool] = field(default_factory=dict)


class _Demo:
    """Runs the steps against one daemon, and says what it sees."""

    def __init__(self, client: Client, output: Output, say: Callable[[str], None]) -> None:
        self._client = client
        self._output = output
        self._say = say
        self.steps: list[_Step] = []

    def answer(self, name: str, title: str, **claims: Callable[[_Step], bool]) -> _Step:
        """Ask the question."""
        with self._step(name, title, claims) as step:
            pass
        return step

    def plan(self, target: Path, title: str) -> _Step:
        with self._step("plan", title, {"level is B2": lambda step: step.level == "B2"}) as step:
            start = time.monotonic()
            plan = self._client.call(self._client.owner.Plan, owner_pb2.PlanRequest(target=str(target))).plan
            step.level, step.outcome = level_name(plan.level), "PLANNED"
            step.rows_written = step.bytes_written = 0
            step.total_ms = round((time.monotonic() - start) * 1000, 1)
            self._say("\n".join(plan_lines(plan)))
        return step

    def move(
        self, name: str, title: str, method: Callable[..., Any], request: Any, **claims: Callable[[_Step], bool]
    ) -> _Step:
        """Run a transition while a client keeps asking."""
        with self._step(name, title, claims) as step:
            with Probe(self._client, PROMPT) as probe:
                for answer in self._client.stream(method, request):
                    event = answer.event
                    self._say(f"  {state_name(event.state):<12} {event.message}")
            record = event.record
            step.level, step.outcome = level_name(record.level), state_name(record.state)
            step.rows_written, step.bytes_written = record.rows_written, record.bytes_written
            step.bytes_read_back = record.bytes_read_back
            step.drain_ms, step.exclusive_ms = record.drain_ms, record.exclusive_ms
            step.total_ms = record.total_ms
            step.pause_ms, step.usual_gap_ms = probe.longest_gap_ms, probe.usual_gap_ms
            ends = {getattr(record, "from").digest, record.to.digest}
            step.claims["every answer meanwhile was one identity's"] = all(
                identity in ends and len(texts) == 1 for identity, texts in probe.texts().items()
            )
            self._say("\n".join(record_lines(record)[1:]))
            self._say(
                f"  a client asking for one token after another got {len(probe.answers)} answers; longest wait "
                f"{probe.longest_gap_ms} ms, usual {probe.usual_gap_ms} ms"
            )
        return step

    def verify(self, name: str, title: str) -> None:
        with self._step(name, title, {}) as step:
            result = self._client.call(self._client.owner.Verify, owner_pb2.VerifyRequest())
            step.claims["the device holds the published identity"] = result.ok
            step.bytes_read_back, step.total_ms = result.bytes_read_back, result.total_ms
            step.outcome = "PROVED" if result.ok else "DRIFT"
            self._say(f"  {result.bytes_read_back} bytes read back and digested in {result.total_ms:.0f} ms")

    @contextmanager
    def _step(self, name: str, title: str, claims: dict[str, Callable[[_Step], bool]]) -> Iterator[_Step]:
        self._say(f"\n== {title}")
        step = _Step(name)
        yield step
        request = inference_pb2.GenerateRequest(prompt=PROMPT, max_tokens=MAX_TOKENS)
        answers = list(self._client.stream(self._client.inference.Generate, request))
        step.text = "".join(answer.text for answer in answers)
        step.identity, step.generation = answers[-1].identity.digest, answers[-1].generation
        step.claims |= {claim.replace("_", " "): check(step) for claim, check in claims.items()}
        step.ok = all(step.claims.values())
        self._say(f"  {PROMPT!r} -> {step.text!r}  [{short(answers[-1].identity)}, generation {step.generation}]")
        for claim, held in step.claims.items():
            self._say(f"  {'holds' if held else 'DOES NOT HOLD'}: {claim}")
        self.steps.append(step)


def _run(
    client: Client, targets: dict[str, Path], fault_file: Path, output: Output, say: Callable[[str], None]
) -> list[_Step]:
    demo = _Demo(client, output, say)
    owner = client.owner

    def to(target: str, require: owner_pb2.Require.ValueType) -> owner_pb2.TransitionRequest:
        return owner_pb2.TransitionRequest(target=str(targets[target]), require=require)

    first = demo.answer("answer", "The resident model answers", says_Paris=lambda step: "Paris" in (step.text or ""))
    demo.plan(targets["rome"], "A target in which the token rows of ' Paris' and ' Rome' are exchanged: its plan")
    changed = demo.move(
        "transition",
        "B2: only the rows that differ are written, and proved on the device",
        owner.Transition,
        to("rome", owner_pb2.REQUIRE_B2),
        published=lambda step: step.outcome == "PUBLISHED",
        two_rows_written=lambda step: step.rows_written == 2,
        says_Rome=lambda step: "Rome" in (step.text or ""),
    )
    fault_file.write_text(json.dumps(FAULT))
    demo.move(
        "corrupted",
        "A second transition, whose device write silently stores one bit wrong",
        owner.Transition,
        to("london", owner_pb2.REQUIRE_B2),
        caught_and_undone=lambda step: step.outcome == "ROLLED_BACK",
        the_fault_was_met=lambda _step: not fault_file.exists(),
        old_identity=lambda step: (step.identity, step.generation) == (changed.identity, changed.generation),
        old_answer=lambda step: step.text == changed.text,
    )
    demo.verify("verify", "Every resident byte is read back")
    demo.move(
        "rollback",
        "Rollback, from the retained undo",
        owner.Rollback,
        owner_pb2.RollbackRequest(generation=changed.generation or 0),
        published=lambda step: step.outcome == "PUBLISHED",
        first_identity=lambda step: step.identity == first.identity,
        first_answer=lambda step: step.text == first.text,
    )
    demo.move(
        "reload",
        "B1 of the same target, for comparison: the old runtime is closed, then the new one is created",
        owner.Transition,
        to("rome", owner_pb2.REQUIRE_B1),
        published=lambda step: step.outcome == "PUBLISHED",
        same_identity_as_B2=lambda step: step.identity == changed.identity,
        same_answer_as_B2=lambda step: step.text == changed.text,
    )
    demo.verify("verify_reload", "Every resident byte is read back again")
    return demo.steps


def _default_checkpoint() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(base) / "rowlock" / "smollm2-135m"


@click.command()
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, resolve_path=True),
    default=_default_checkpoint,
    show_default="SmolLM2-135M, converted on the first use",
    help="Base model: any Llama-family checkpoint that answers the question.",
)
@click.option(
    "--work",
    type=click.Path(path_type=Path, resolve_path=True),
    help="Keep targets, state and log there; a temporary directory otherwise.",
)
@output_options
def command(checkpoint: Path, work: Path | None, output: Output) -> int:
    """Show the main job on a real model, from start to end.

    Starts a real daemon on the CPU. Exit code 0 only if every claim held.
    """
    say = click.echo if not output.json else output.progress
    base = demo_checkpoint(checkpoint, output)
    directory = work or Path(tempfile.mkdtemp(prefix="rowlock-demo-"))
    try:
        shutil.rmtree(directory / "state", ignore_errors=True)
        targets = {
            "base": base,
            "rome": exchanged(base, directory / "rome", PARIS, ROME),
            "london": exchanged(base, directory / "london", PARIS, LONDON),
        }
        fault_file = directory / "fault.json"
        fault_file.unlink(missing_ok=True)
        start = time.monotonic()
        options = ["--checkpoint", str(base), "--test-fault-file", str(fault_file)]
        with DaemonProcess(directory / "state", options) as daemon:
            say(f"A daemon owns the device and holds {base.name}: ready after {time.monotonic() - start:.1f} s")
            steps = _run(daemon.client, targets, fault_file, output, say)
    finally:
        if work is None:
            shutil.rmtree(directory, ignore_errors=True)
    ok = all(step.ok for step in steps)
    say("\nEvery claim held." if ok else "\nA claim did NOT hold.")
    if output.json:
        print_json(
            {
                "model": base.name,
                "ok": ok,
                "prompt": PROMPT,
                "max_tokens": MAX_TOKENS,
                "checkpoints": {name: str(path) for name, path in targets.items()},
                "fault": FAULT,
                "steps": [vars(step) for step in steps],
            }
        )
    return 0 if ok else EXIT_CLAIM_FAILED
