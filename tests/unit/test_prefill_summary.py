"""The summary of the prefill benchmark refuses records that cannot be what a run has left."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from prefill_summary import ARMS, RecordError, check, figures

SCENARIO = {
    "model": "m", "prompt": 64, "requests": 2, "slots": 8, "pace_ms": 0.0, "layers": 3, "tokens": 2, "run": 0,
    "runs": 1,
}  # fmt: skip


def good() -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{"kind": "memcpy", **SCENARIO, "gb_s": 8.0}]
    for place, arm in enumerate(ARMS):
        for index in range(2):
            where = {**SCENARIO, "arm": arm, "place": place, "index": index}
            records.append({"kind": "request", **where, "answer": [1, index], "token_s": [0.5, 0.75], "wall_s": 1.0})
            early = 5 if arm == "stream" else 0
            records.append(
                {
                    "kind": "import", **where, "prompt_tokens": 64, "begun_ns": 0, "computed_ns": 100, "done_ns": 110,
                    "admitted_ns": 130, "copies": 10, "copies_before_computed": early, "copy_ns": 50,
                    "exposed_copy_ns": 20, "bytes": 400, "request": index, "spans": 10,
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


def _set(**changes: Any) -> Callable[[list[dict[str, Any]]], None]:
    def change(records: list[dict[str, Any]]) -> None:
        kind = "request" if changes.keys() & {"token_s", "answer"} else "import"
        where(records, kind=kind, arm=changes.pop("arm", "whole")).update(changes)

    return change


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (_drop, "is missing"),
        (_drop_arm, "is missing"),
        (_twice, "too often"),
        (lambda records: records.pop(0), "is missing"),
        (_set(prompt_tokens=63), "a prompt of 63 tokens"),
        (_set(done_ns=99), "order that cannot be"),
        (_set(token_s=[0.75, 0.5]), "order that cannot be"),
        (_set(token_s=[0.5]), "1 tokens of 2"),
        (_set(token_s=[0.5, 1.5]), "outlasts"),
        (_set(copies_before_computed=1), "before the source was done"),
        (_set(exposed_copy_ns=51), "more than the whole"),
        (_set(answer=[9, 9]), "answer differently"),
        (_set(place=1), "the same turn"),
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
    stream = [
        [item for item in records if (item["kind"], item.get("arm")) == (kind, "stream")]
        for kind in ("request", "import")
    ]
    found = figures(*stream)
    assert (found["first_token_ms"], found["per_token_ms"], found["completion_ms"]) == (500, 250, 750)
    assert (found["early_percent"], found["import_gb_s"]) == (50, 8)
    assert found["hidden_copy_ms"] == pytest.approx(3e-5)
