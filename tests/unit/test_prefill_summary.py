"""The summary of the prefill benchmark refuses records that cannot be what a run has left."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from prefill_summary import ARMS, RecordError, check, figures, threshold, whole_runs

SCENARIO = {
    "model": "m", "prompt": 64, "requests": 2, "slots": 8, "pace_ms": 0.0, "layers": 3, "tokens": 2, "run": 0,
    "runs": 1,
}  # fmt: skip


PLAN = {**SCENARIO, "kind": "plan", "prompts": [64], "all_requests": [2]}


def good() -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [dict(PLAN), {"kind": "memcpy", **SCENARIO, "gb_s": 16.0}]
    for place, arm in enumerate(ARMS):
        turn = {**SCENARIO, "arm": arm, "place": place}
        records.append({"kind": "run", **turn, "all_prompt_tokens": 128})
        for index in range(2):
            where = {**turn, "index": index, "prompt_tokens": 64}
            records.append({"kind": "request", **where, "answer": [1, index], "token_s": [0.5, 0.75], "wall_s": 1.0})
            at, early = 1000 * place, 6 if arm == "stream" else 0
            records.append(
                {
                    "kind": "import", **where, "begun_ns": at, "computed_ns": at + 100, "done_ns": at + 110,
                    "copied_ns": at + 120, "admitted_ns": at + 130, "copies": 12, "spans_before_computed": early,
                    "copy_ns": 50, "exposed_copy_ns": 20, "bytes": 400, "request": index, "spans": 10,
                }
            )  # fmt: skip
    return records


def where(records: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return next(record for record in records if all(record.get(key) == value for key, value in fields.items()))


def _drop(records: list[dict[str, Any]]) -> None:
    records.remove(where(records, kind="request", arm="stream", index=1))


def _drop_arm(records: list[dict[str, Any]]) -> None:
    records[:] = [record for record in records if record.get("arm") != "deferred"]


def _twice(records: list[dict[str, Any]]) -> None:
    records.append(copy.deepcopy(where(records, arm="whole")))


def _set(kind: str, arm: str = "whole", **changes: Any) -> Callable[[list[dict[str, Any]]], None]:
    def change(records: list[dict[str, Any]]) -> None:
        where(records, kind=kind, arm=arm).update(changes)

    return change


def _plan(**changes: Any) -> Callable[[list[dict[str, Any]]], None]:
    def change(records: list[dict[str, Any]]) -> None:
        records[0] = {**PLAN, **changes}

    return change


def _paced(records: list[dict[str, Any]]) -> None:
    records[:] = [{**record, "pace_ms": 20.0} for record in records]
    where(records, kind="import", arm="stream", index=0)["spans_before_computed"] = 4


def _other_order(records: list[dict[str, Any]]) -> None:
    """Whole results last, in a run that begins with them."""
    places = {"whole": 2, "stream": 0, "deferred": 1}
    for record in records:
        if "arm" in record:
            record["place"] = places[record["arm"]]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_drop, "is missing"),
        (_drop_arm, "is missing"),
        (_twice, "too often"),
        (lambda records: records.pop(1), "is missing"),
        (_plan(prompts=[64, 128]), "was planned and is missing"),
        (_plan(runs=2), "was planned and is missing"),
        (_plan(prompts=[]), "was never planned"),
        (lambda records: records.append(PLAN), "planned twice"),
        (_set("import", prompt_tokens=63), "a prompt of 63 tokens"),
        (_set("request", prompt_tokens=65), "a prompt of 65 tokens"),
        (_set("run", all_prompt_tokens=64), "64 prompt tokens in all"),
        (_set("import", bytes=399), "different sizes"),
        (_set("import", done_ns=99), "order that cannot be"),
        (_set("import", copied_ns=131), "order that cannot be"),
        (_set("import", "stream", begun_ns=100), "at the same time"),
        (_set("request", token_s=[0.75, 0.5]), "order that cannot be"),
        (_set("request", token_s=[0.5]), "1 tokens of 2"),
        (_set("request", token_s=[0.5, 1.5]), "outlasts"),
        (_set("import", spans_before_computed=1), "before the source was done"),
        (_paced, "10 of 20 spans before the paced source"),
        (_set("import", exposed_copy_ns=51), "more than the whole"),
        (_set("request", answer=[9, 9]), "answer differently"),
        (_set("import", place=1), "take turns"),
        (_other_order, "take turns"),
    ],
)
def test_records_that_cannot_be_are_refused(change: Callable[[list[dict[str, Any]]], None], word: str) -> None:
    records = good()
    change(records)
    with pytest.raises(RecordError, match=word):
        check(records)


def test_good_records_give_their_figures() -> None:
    records = good()
    check(records)
    stream = {
        kind: [item for item in records if (item["kind"], item.get("arm")) == (kind, "stream")]
        for kind in ("request", "import", "run")
    }
    assert figures(stream["request"], stream["import"], {0: 16.0}) == pytest.approx(
        {
            "first_token_ms": 500, "per_token_ms": 250, "completion_ms": 750, "tail_ms": 2e-5, "place_ms": 1e-5,
            "hidden_copy_ms": 3e-5, "exposed_copy_ms": 2e-5, "early_percent": 60, "import_gb_s": 8,
            "of_memcpy_percent": 50,
        }
    )  # fmt: skip
    assert whole_runs(stream["request"], stream["run"]) == {"all_prompts": 128, "all_done_ms": 1000}


def test_streaming_is_ahead_from_the_length_on_after_which_it_never_loses() -> None:
    assert threshold({64: 0.1, 128: -0.1, 256: 0.1, 512: 0.2}) == "from 256 tokens on"
    assert threshold({64: 0.1, 128: -0.1}) == "at no length that was measured"
