"""Every figure of a run of benchmarks/prefill.py, from its raw records alone, after checking them.

    python benchmarks/prefill_summary.py FILE

Refused: what was planned and is not there, a run without one of its arms, an arm or a request twice, prompts of another
length than was asked for, one by one or all together, moments in an order that cannot be, arms that did not take turns,
imports of different sizes, spans that came early where none can, or late where most have to be early, and arms whose
answers differ.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
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
    runs: dict[tuple[Scenario, int], list[Record]] = defaultdict(list)
    for record in records:
        if record["kind"] != "plan":
            runs[scenario_of(record), record["run"]].append(record)
    _check_plans([record for record in records if record["kind"] == "plan"], set(runs))
    for record in records:
        if record["kind"] == "request":
            _check_request(record)
        elif record["kind"] == "import":
            _check_import(record)
    for found in runs.values():
        _check_run(found)


def _check_plans(plans: list[Record], runs: set[tuple[Scenario, int]]) -> None:
    planned = [
        (scenario_of({**plan, "prompt": prompt, "requests": requests}), run)
        for plan in plans
        for prompt, requests in itertools.product(plan["prompts"], plan["all_requests"])
        for run in range(plan["runs"])
    ]
    if lost := set(planned) - runs:
        raise RecordError(f"{min(lost, key=str)}: was planned and is missing")
    if more := runs - set(planned):
        raise RecordError(f"{min(more, key=str)}: was never planned")
    if len(planned) > len(runs):
        raise RecordError("the same was planned twice")


def _check_run(records: list[Record]) -> None:
    where = f"{scenario_of(records[0])}, run {records[0]['run']}"
    requests = records[0]["requests"]
    count = Counter((record["kind"], record.get("arm"), record.get("index")) for record in records)
    wanted: set[tuple[str, str | None, int | None]] = {("memcpy", None, None), *(("run", arm, None) for arm in ARMS)}
    wanted |= {(kind, arm, index) for kind in ("request", "import") for arm in ARMS for index in range(requests)}
    if missing := wanted - count.keys():
        raise RecordError(f"{where}: {sorted(map(str, missing))[0]} is missing")
    if more := [key for key in count if key not in wanted or count[key] > 1]:
        raise RecordError(f"{where}: {more[0]} is there too often")
    _check_turns(where, records)
    for record in records:
        if record["kind"] == "run" and record["all_prompt_tokens"] != record["prompt"] * requests:
            raise RecordError(f"{where}: {record['all_prompt_tokens']} prompt tokens in all")
    streamed = [record for record in records if (record["kind"], record.get("arm")) == ("import", "stream")]
    early, spans = (sum(item[name] for item in streamed) for name in ("spans_before_computed", "spans"))
    if records[0]["pace_ms"] and 2 * early <= spans:
        raise RecordError(f"{where}: {early} of {spans} spans before the paced source was done, which has to be slower")
    if len({record["bytes"] for record in records if record["kind"] == "import"}) != 1:
        raise RecordError(f"{where}: imports of different sizes")
    if not records[0]["pace_ms"]:
        answers = {(record["index"], tuple(record["answer"])) for record in records if record["kind"] == "request"}
        if len(answers) != requests:
            raise RecordError(f"{where}: the arms answer differently")


def _check_turns(where: str, records: list[Record]) -> None:
    """The arms alternate: another one begins each run, and none begins before the one before it has ended."""
    ends: list[int] = []
    for place in range(len(ARMS)):
        imports = [item for item in records if item["kind"] == "import" and item["place"] == place]
        if {item["arm"] for item in imports} != {ARMS[(place + records[0]["run"]) % len(ARMS)]}:
            raise RecordError(f"{where}: the arms did not take turns")
        if ends and min(item["begun_ns"] for item in imports) < ends[-1]:
            raise RecordError(f"{where}: two arms ran at the same time")
        ends.append(max(item["admitted_ns"] for item in imports))


def _check_request(record: Record) -> None:
    _check_length(record)
    times = record["token_s"]
    if len(times) != record["tokens"] or len(record["answer"]) != record["tokens"]:
        raise RecordError(f"{scenario_of(record)}: {len(times)} tokens of {record['tokens']}")
    if times[0] <= 0 or any(later < earlier for earlier, later in itertools.pairwise(times)):
        raise RecordError(f"{scenario_of(record)}: tokens in an order that cannot be")
    if times[-1] > record["wall_s"]:
        raise RecordError(f"{scenario_of(record)}: a request outlasts its run")


def _check_length(record: Record) -> None:
    if record["prompt_tokens"] != record["prompt"]:
        raise RecordError(f"{scenario_of(record)}: a prompt of {record['prompt_tokens']} tokens")


def _check_import(record: Record) -> None:
    _check_length(record)
    for names in (("begun_ns", "computed_ns", "done_ns", "admitted_ns"), ("begun_ns", "copied_ns", "admitted_ns")):
        moments = [record[name] for name in names]
        if moments != sorted(moments):
            raise RecordError(f"{scenario_of(record)}: moments in an order that cannot be")
    early, spans = record["spans_before_computed"], record["spans"]
    if record["exposed_copy_ns"] > record["copy_ns"] or early > spans:
        raise RecordError(f"{scenario_of(record)}: a part that is more than the whole")
    if record["arm"] != "stream" and early:
        raise RecordError(f"{scenario_of(record)}: {record['arm']} has spans before the source was done")


def figures(requests: list[Record], imports: list[Record], memcpy: dict[int, float]) -> dict[str, float]:
    """Medians over all requests of one scenario and arm, each request with its own length.

    Args:
        requests: of all runs.
        imports: of all runs, in the order in which they became requests that run.
        memcpy: GB/s of each run.

    """

    def middle(values: Iterable[float]) -> float:
        return statistics.median(values)

    def here(item: Record) -> int:
        """When all of it was here."""
        return int(max(item["copied_ns"], item["done_ns"]))

    return {
        "first_token_ms": middle(item["token_s"][0] * 1000 for item in requests),
        "per_token_ms": middle(
            (item["token_s"][-1] - item["token_s"][0]) * 1000 / (item["tokens"] - 1) for item in requests
        ),
        "completion_ms": middle(item["token_s"][-1] * 1000 for item in requests),
        "tail_ms": middle((here(item) - item["computed_ns"]) / 1e6 for item in imports),
        "place_ms": middle((item["admitted_ns"] - here(item)) / 1e6 for item in imports),
        "hidden_copy_ms": middle((item["copy_ns"] - item["exposed_copy_ns"]) / 1e6 for item in imports),
        "exposed_copy_ms": middle(item["exposed_copy_ns"] / 1e6 for item in imports),
        "early_percent": 100 * middle(item["spans_before_computed"] / item["spans"] for item in imports),
        "import_gb_s": middle(item["bytes"] / item["copy_ns"] for item in imports),
        "of_memcpy_percent": 100 * middle(item["bytes"] / item["copy_ns"] / memcpy[item["run"]] for item in imports),
    }


def whole_runs(requests: list[Record], runs: list[Record]) -> dict[str, float]:
    """Medians over the runs of one scenario and arm, all requests of a run taken together."""
    walls = {item["run"]: item["wall_s"] for item in requests}
    return {
        "all_prompts": statistics.median(item["all_prompt_tokens"] for item in runs),
        "all_done_ms": statistics.median(wall * 1000 for wall in walls.values()),
    }


def threshold(gains: dict[int, float]) -> str:
    """From which length on streaming was ahead, of those measured: ``gains`` are shares of completion by length."""
    ahead = [length for length in gains if all(gains[other] > 0 for other in gains if other >= length)]
    return f"from {min(ahead)} tokens on" if ahead else "at no length that was measured"


def main(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    check(records)
    memcpy: dict[Scenario, dict[int, float]] = defaultdict(dict)
    arms: dict[Scenario, dict[tuple[str, str], list[Record]]] = defaultdict(lambda: defaultdict(list))
    gains: dict[Scenario, dict[int, float]] = defaultdict(dict)
    for record in records:
        if record["kind"] == "memcpy":
            memcpy[scenario_of(record)][record["run"]] = record["gb_s"]
        elif record["kind"] != "plan":
            arms[scenario_of(record)][record["arm"], record["kind"]].append(record)
    for scenario, found in sorted(arms.items()):
        print(", ".join(f"{name} {value}" for name, value in zip(SCENARIO, scenario, strict=True)))
        rows = {
            arm: figures(found[arm, "request"], found[arm, "import"], memcpy[scenario])
            | whole_runs(found[arm, "request"], found[arm, "run"])
            for arm in ARMS
        }
        for name in rows["whole"]:
            line = "  ".join(f"{arm} {row[name]:9.2f}" for arm, row in rows.items())
            print(f"  {name:17} {line}")
        gain = 1 - rows["stream"]["completion_ms"] / rows["whole"]["completion_ms"]
        print(f"  streaming: {gain:+.1%} of completion; memcpy {statistics.median(memcpy[scenario].values()):.1f} GB/s")
        gains[scenario[:1] + scenario[2:]][scenario[1]] = gain
    for others, by_length in gains.items():
        print(f"{dict(zip(('model', *SCENARIO[2:]), others, strict=True))}: streaming is ahead {threshold(by_length)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
