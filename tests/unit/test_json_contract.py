"""The JSON forms are a contract: fields and kinds are pinned, and docs/json.md is made from the same."""

from __future__ import annotations

import json
from pathlib import Path

from rowlock.cli.contract import OPERATIONS, shape_of
from rowlock.cli.render import to_json
from rowlock.v1 import owner_pb2

PINNED = Path(__file__).parent / "json_contract.json"


def test_the_five_operations_have_their_pinned_form() -> None:
    """A change here is a change for every client: only ever add fields, and write it in the changelog."""
    found = {name: shape_of(message.DESCRIPTOR) for name, message in OPERATIONS.items()}
    assert found == json.loads(PINNED.read_text())


def test_values_have_the_shape_that_is_written_down() -> None:
    record = owner_pb2.TransitionRecord(
        id="x", state=owner_pb2.TRANSITION_STATE_PUBLISHED, generation=2**40, phases=[owner_pb2.Phase(name="a", ms=1.5)]
    )
    value = to_json(record)
    assert value["generation"] == 2**40, "numbers are numbers"
    assert value["state"] == "PUBLISHED"
    assert value["from"] is None
    assert value["phases"] == [{"name": "a", "ms": 1.5}]
    assert value["level"] is None
    assert set(value) == set(shape_of(owner_pb2.TransitionRecord.DESCRIPTOR))
    json.dumps(value)
