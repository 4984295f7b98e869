"""Five pairs of B2 and B1 on one device, through the real daemon: raw records, and whether the answers agree.

Writes to the folder `describe.json`, `transitions.jsonl` (one record a line) and `pairs.json`. Ends with 1 if
an answer after rows in place is not that of a fresh load, or a transition did not publish.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.checkpoints import EMBED, change_rows, negate, write_tiny
from support.daemons import answer, transition

from rowlock.cli.daemon_process import DaemonProcess
from rowlock.cli.render import to_json
from rowlock.v1 import owner_pb2

PAIRS = 5
ROWS = list(range(0, 200, 2))


def move(daemon: DaemonProcess, target: Path, level: str) -> tuple[dict[str, Any], list[int]]:
    """One transition of one level, its record, and the answer of what is resident then."""
    record = transition(daemon, target=str(target), require=owner_pb2.Require.Value(f"REQUIRE_{level}"))[-1].record
    tokens, _ = answer(daemon, "five pairs")
    return to_json(record), tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="a Llama checkpoint directory; else a tiny one is made")
    parser.add_argument("--without-hardware", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        base = options.checkpoint or write_tiny(Path(work) / "base")
        target = change_rows(base, Path(work) / "target", EMBED, ROWS, negate)
        arguments = ["--device", options.device, "--checkpoint", str(base)]
        arguments += ["--without-hardware"] if options.without_hardware else []
        with DaemonProcess(Path(work) / "state", arguments) as daemon:
            described = to_json(daemon.client.call(daemon.client.owner.Describe, owner_pb2.DescribeRequest()))
            (options.out / "describe.json").write_text(json.dumps(described, indent=1) + "\n")
            return run(daemon, base, target, described, options.out)


def run(daemon: DaemonProcess, base: Path, target: Path, described: dict[str, Any], out: Path) -> int:
    """Rows in place to the target and back by reload, then the other way round: both levels give both answers."""
    records, answers = [], []
    for pair in range(PAIRS):
        levels = ("B2", "B1") if pair % 2 == 0 else ("B1", "B2")
        for directory, level in zip((target, base), levels, strict=True):
            record, tokens = move(daemon, directory, level)
            records.append(record)
            answers.append({"to": directory.name, "level": level, "tokens": tokens})
    published = all(record["state"] == "PUBLISHED" for record in records)
    agree = all(
        len({tuple(item["tokens"]) for item in answers if item["to"] == name}) == 1 for name in ("target", base.name)
    )
    differ = len({tuple(item["tokens"]) for item in answers}) > 1
    (out / "transitions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary = {
        "device": described["owner"]["device"],
        "execution": described["execution"],
        "readback": described["readback"],
        "test_options": described["test_options"],
        "published": published,
        "answers_agree": agree,
        "answers_differ_between_targets": differ,
        "exclusive_ms": {
            level: [record["exclusive_ms"] for record in records if record["level"] == level] for level in ("B2", "B1")
        },
        "answers": answers,
    }
    (out / "pairs.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key != "answers"}, indent=1))
    return 0 if published and agree and differ else 1


if __name__ == "__main__":
    sys.exit(main())
