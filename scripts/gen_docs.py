"""Write the parts of docs/ that are made from tables in the code. With --check: fail if they are not current."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rowlock.cli.client import OUTCOME_EXIT
from rowlock.cli.contract import OPERATIONS, shape_of
from rowlock.daemon.answering.meter import REQUEST_METRICS
from rowlock.daemon.config import SCHEMA
from rowlock.daemon.http.owner_metrics import OWNER_METRICS
from rowlock.daemon.owner.states import OWNER_TABLE, TERMINAL, TRANSITION_TABLE
from rowlock.v1 import owner_pb2
from rowlock.v1.errors import REASONS

DOCS = Path(__file__).resolve().parent.parent / "docs"
NOTE = "<!-- Made by scripts/gen_docs.py from the code: change it there. -->\n\n"


def states() -> str:
    lines = [
        "# States",
        "",
        "## A transition",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> PLANNED",
        *(f"    {before} --> {after}: {event}" for (before, event), after in TRANSITION_TABLE.items()),
        *(f"    {state} --> [*]" for state in sorted(TERMINAL)),
        "```",
        "",
        "| in | when | then |",
        "|---|---|---|",
        *(f"| {before} | {event} | {after} |" for (before, event), after in TRANSITION_TABLE.items()),
        "",
        "What is not in the table cannot happen. Nothing is written in PLANNED, STAGED and JOURNALED as long as the",
        "process lives that knows it; recovery takes JOURNALED to mean that writes may have begun.",
        "",
        "| outcome | the command line exits with |",
        "|---|---|",
        *(
            f"| {owner_pb2.TransitionState.Name(state).removeprefix('TRANSITION_STATE_')} | {code} |"
            for state, code in OUTCOME_EXIT.items()
        ),
        "",
        "## An owner",
        "",
        "Derived from three facts, and stored nowhere.",
        "",
        "| quarantined | transition or load open | model resident | state |",
        "|---|---|---|---|",
        *(
            f"| {'yes' if quarantined else 'no'} | {'yes' if busy else 'no'} | {'yes' if resident else 'no'} | {state} |"
            for (quarantined, busy, resident), state in OWNER_TABLE.items()
        ),
    ]
    return NOTE + "\n".join(lines) + "\n"


def errors() -> str:
    lines = [
        "# Errors",
        "",
        "Every refusal carries one `google.rpc.ErrorInfo` (domain `rowlock.v1`) with one of these reasons and a hint; a",
        "transition that did not publish has the same reason in its record. The exit code is that of the command line",
        "when a call is refused; a refusal never exits with 9, since nothing was begun.",
        "",
        "UNAVAILABLE: call again. ABORTED: read again, then call again. FAILED_PRECONDITION: mend the state first.",
        "DATA_LOSS: bytes differ. RESOURCE_EXHAUSTED: memory, disk or a queue is full.",
        "",
        "Over HTTP the reason is the error's `code`, in small letters (CONTEXT_EXCEEDED is OpenAI's `context_length_exceeded`), and",
        "429 and 503 come with `Retry-After`.",
        "",
        "| reason | status | HTTP | exit | what to do |",
        "|---|---|---|---|---|",
        *(
            f"| {reason} | {info.status.name} | {info.http_status} | {3 if info.exit_code == 9 else info.exit_code} | {info.hint} |"
            for reason, info in REASONS.items()
        ),
    ]
    return NOTE + "\n".join(lines) + "\n"


def configuration() -> str:
    lines = [
        "# Configuration",
        "",
        "`rowlock serve --config FILE` reads TOML. `--check-config` checks it and ends. Options of the command line come",
        "first. An unknown or wrong key is an error that names the line and the nearest key there is. All keys are optional.",
        "",
    ]
    for section, keys in SCHEMA.items():
        lines += [f"## [{section}]", "", "| key | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {key.text} |" for name, key in keys.items()]
        lines.append("")
    return NOTE + "\n".join(lines)


def json_forms() -> str:
    lines = [
        "# JSON",
        "",
        "What `--json` prints on stdout: one document, or JSON Lines for `transition`, `rollback`, `unload`, `generate` and",
        "`status --watch` (with `cache` and `tokens_per_s` beside the fields of `status`). Every field is always there; numbers are numbers; an absent message or an unset enum is `null`;",
        'times are seconds since the epoch. An error is `{"error": {"message", "reason", "hint"}}`, with the reason from',
        "[errors.md](errors.md) and the exit code of the process.",
        "",
        "Five forms are pinned by a test; fields may be added to them, and are never taken away or changed.",
        "",
        "| operation | printed by |",
        "|---|---|",
        "| describe | `rowlock describe --json` |",
        "| identity | `rowlock status --json`, its `identity`; `rowlock manifest DIR --json` |",
        "| plan | `rowlock plan --target DIR --json` |",
        "| apply | `record` of the last line of `rowlock transition`, `rollback`, `unload`; `rowlock history ID --json` |",
        "| generate | each line of `rowlock generate --json` |",
        "",
    ]
    for name, message in OPERATIONS.items():
        lines += [f"## {name}", "", "```json", json.dumps(shape_of(message.DESCRIPTOR), indent=2), "```", ""]
    return NOTE + "\n".join(lines)


def faults() -> str:
    rows = json.loads((DOCS.parent / "tests" / "sim" / "faults.json").read_text())
    lines = [
        "# Faults",
        "",
        "What comes of every fault, at every place where it can happen: `make faults` lets each happen again and compares with",
        "this table; `make faults FAULTS=--write` writes it anew, a test run never does. The journal, the files and the owner are the",
        "real ones, the disk and the device are simulated (see [invariants.md](invariants.md)).",
        "",
        "- `open_new`, `open_stopped`, `open_killed`, `open_older`: the journal is opened by a starting owner, where there is none,",
        "  one that was closed, one with a write-ahead log, one of the first version. A refusal names the file, and changes no history.",
        "- The outcome says how the transition ended and with which reason, what is served then, and what after a restart",
        "  without the fault. `refused` comes before anything was begun; `the owner thread is given up`: the watchdog fired.",
        "- `always`: from then on, every time. `device lost`: from then on every device call fails. `journal lost`: from then on",
        "  nothing can be written to the journal; a quarantine that cannot be recorded lasts as long as its process.",
        "- `embed:2`: the second write to, or read of, `embed` in that phase; rows with the same outcome are one.",
        "- `neighbour`, `next_group`, `other_parent`, `kv`: the write also hits the next row, the next group, an allocation that the",
        "  transition does not touch, the K/V pool. No sequence lives during a write, so nothing is left to hit in the pool.",
        "- With `verify = parents` a stray write into an allocation that is not touched is not read before the publish: it is found",
        "  by `rowlock verify`, by `verify = all`, and whenever that transition has to be undone.",
        "",
    ]
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        lines += [f"## {scenario}", "", "| phase | operation | on | fault | outcome |", "|---|---|---|---|---|"]
        lines += [
            f"| {row['phase']} | {row['operation']} | {row['subjects']} | {row['fault']} | {row['outcome']} |"
            for row in rows
            if row["scenario"] == scenario
        ]
        lines.append("")
    return NOTE + "\n".join(lines)


def metrics() -> str:
    lines = [
        "# Metrics",
        "",
        "`GET /metrics` of the HTTP API ([serving.md](serving.md)), in Prometheus' text format. Counters end in `_total`. What is counted",
        "of transitions is read from the journal, and goes on after a restart; everything else begins with the process.",
        "",
        "| metric | kind | labels | |",
        "|---|---|---|---|",
        *(
            f"| `{name}{'_total' if info.kind == 'counter' else ''}` | {info.kind} | "
            f"{', '.join(f'`{label}`' for label in info.labels)} | {info.text} |"
            for name, info in (OWNER_METRICS | REQUEST_METRICS).items()
        ),
    ]
    return NOTE + "\n".join(lines) + "\n"


PAGES = {
    "metrics.md": metrics,
    "states.md": states,
    "errors.md": errors,
    "configuration.md": configuration,
    "json.md": json_forms,
    "faults.md": faults,
}


def main() -> None:
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            stale.append(str(path))
    if stale:
        raise SystemExit(f"not current: {', '.join(stale)}; run `python scripts/gen_docs.py`")


if __name__ == "__main__":
    main()
