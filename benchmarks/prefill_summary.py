"""Every figure of a run of benchmarks/prefill.py, from its raw records alone, after checking them.

    python benchmarks/prefill_summary.py FILE

Refused: a run without one of its arms, an arm or a request twice, a prompt of another length than was asked for,
moments in an order that cannot be, a run with fewer or more requests than it says, arms whose answers differ.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ARMS = ("whole", "stream", "deferred")
SCENARIO = ("model", "prompt", "requests", "slots", "pace_ms", "layers", "tokens")
Record = dict[str, Any]
Scenario = tuple[Any, ...]
"""Values of SCENARIO."""


class RecordError(Exception):
    """Records that cannot be what a run has left."""


def scenario_of(record: Record) -> Scenario:
    return tuple(record[name] for name in SCENARIO)


def check(records: list[Record]) -> None:
    """Raise RecordError for the first thing that cannot be."""
    for record in records:
        if record["kind"] == "request":
            _check_request(record)
        elif record["kind"] == "import":
            _check_import(record)
    runs = {(scenario_of(record), record["run"]) for record in records}
    for scenario in {key for key, _ in runs}:
        wanted = next(record["runs"] for record in records if scenario_of(record) == scenario)
        there = {run for key, run in runs if key == scenario}
        if there != set(range(wanted)):
            raise RecordError(f"{scenario}: runs {sorted(there)} of {wanted}")
    for scenario, run in runs:
        _check_run([record for record in records if (scenario_of(record), record["run"]) == (scenario, run)])


def _check_run(records: list[Record]) -> None:
    where = f"{scenario_of(records[0])}, run {records[0]['run']}"
    requests = records[0]["requests"]
    count = Counter((record["kind"], record.get("arm"), record.get("index")) for record in records)
    wanted: set[tuple[str, str | None, int | None]] = {("memcpy", None, None)}
    wanted |= {(kind, arm, index) for kind in ("request", "import") for arm in ARMS for index in range(requests)}
    if missing := wanted - count.keys():
        raise RecordError(f"{where}: {sorted(map(str, missing))[0]} is missing")
    if more := [key for key in count if key not in wanted or count[key] > 1]:
        raise RecordError(f"{where}: {more[0]} is there too often")
    places = {(record["arm"], record["place"]) for record in records if record["kind"] != "memcpy"}
    if sorted(place for _, place in places) != list(range(len(ARMS))):
        raise RecordError(f"{where}: two arms had the same turn")
    if not records[0]["pace_ms"]:
        answers = {(record["index"], tuple(record["answer"])) for record in records if record["kind"] == "request"}
        if len(answers) != requests:
            raise RecordError(f"{where}: the arms answer differently")


def _check_request(record: Record) -> None:
    times = record["token_s"]
    if len(times) != record["tokens"] or len(record["answer"]) != record["tokens"]:
        raise RecordError(f"{scenario_of(record)}: {len(times)} tokens of {record['tokens']}")
    if times[0] <= 0 or any(later < earlier for earlier, later in itertools.pairwise(times)):
        raise RecordError(f"{scenario_of(record)}: tokens in an order that cannot be")
    if times[-1] > record["wall_s"]:
        raise RecordError(f"{scenario_of(record)}: a request outlasts its run")


def _check_import(record: Record) -> None:
    if record["prompt_tokens"] != record["prompt"]:
        raise RecordError(f"{scenario_of(record)}: a prompt of {record['prompt_tokens']} tokens")
    moments = [record[name] for name in ("begun_ns", "computed_ns", "done_ns", "admitted_ns")]
    if moments != sorted(moments):
        raise RecordError(f"{scenario_of(record)}: moments in an order that cannot be")
    if record["exposed_copy_ns"] > record["copy_ns"] or record["copies_before_computed"] > record["copies"]:
        raise RecordError(f"{scenario_of(record)}: a part that is more than the whole")
    if record["arm"] != "stream" and record["copies_before_computed"]:
        raise RecordError(f"{scenario_of(record)}: {record['arm']} has spans before the source was done")


def figures(requests: list[Record], imports: list[Record]) -> dict[str, float]:
    """Medians over all requests of one scenario and arm."""

    def middle(values: list[float]) -> float:
        return statistics.median(values)

    return {
        "first_token_ms": middle([item["token_s"][0] * 1000 for item in requests]),
        "per_token_ms": middle(
            [(item["token_s"][-1] - item["token_s"][0]) * 1000 / (item["tokens"] - 1) for item in requests]
        ),
        "completion_ms": middle([item["token_s"][-1] * 1000 for item in requests]),
        "all_done_ms": middle([item["wall_s"] * 1000 for item in requests]),
        "tail_ms": middle([(item["admitted_ns"] - item["computed_ns"]) / 1e6 for item in imports]),
        "hidden_copy_ms": middle([(item["copy_ns"] - item["exposed_copy_ns"]) / 1e6 for item in imports]),
        "exposed_copy_ms": middle([item["exposed_copy_ns"] / 1e6 for item in imports]),
        "early_percent": 100 * middle([item["copies_before_computed"] / item["copies"] for item in imports]),
        "import_gb_s": middle([item["bytes"] / max(item["copy_ns"], 1) for item in imports]),
    }


def main(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    check(records)
    memcpy: dict[Scenario, list[float]] = defaultdict(list)
    arms: dict[Scenario, dict[tuple[str, str], list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record["kind"] == "memcpy":
            memcpy[scenario_of(record)].append(record["gb_s"])
        else:
            arms[scenario_of(record)][record["arm"], record["kind"]].append(record)
    for scenario, found in sorted(arms.items()):
        print(", ".join(f"{name} {value}" for name, value in zip(SCENARIO, scenario, strict=True)))
        speed = statistics.median(memcpy[scenario])
        rows = {arm: figures(found[arm, "request"], found[arm, "import"]) for arm in ARMS}
        for name in rows["whole"]:
            line = "  ".join(f"{arm} {row[name]:9.2f}" for arm, row in rows.items())
            print(f"  {name:16} {line}")
        gain = 1 - rows["stream"]["completion_ms"] / rows["whole"]["completion_ms"]
        share = rows["stream"]["import_gb_s"] / speed
        print(f"  streaming: {gain:+.1%} of completion; import at {share:.0%} of memcpy ({speed:.1f} GB/s)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
