"""Faults as data: what comes of each is in the table in git. `make faults` compares all of it."""

from __future__ import annotations

import pytest

from sim.faults import FILE_FAULTS, differences, golden, table_of
from sim.scenarios import World


@pytest.mark.parametrize("name", ["open_stopped", "open_older", "b2", "b2_restored", "unload"])
def test_faults_come_to_what_the_table_says(world: World, name: str) -> None:
    """Rerun one: PYTHONPATH=tests python -m sim.faults --only NAME."""
    assert differences({name: table_of(world, name)}) == []


def test_every_outcome_in_the_table_is_old_or_new_or_says_so() -> None:
    """No row may serve anything else; bytes that nothing read are found by a verification."""
    table = [row for rows in golden().values() for row in rows]
    assert len(table) > 500
    for row in table:
        ended, _, restart = row["outcome"].partition("; restart: ")
        serves = ended.rpartition("; ")[2]
        if row["scenario"].startswith("open_"):
            assert (ended, serves) in {
                ("refused to start; not running", "not running"),
                ("starts; as before", "as before"),
            }
            continue
        assert serves.startswith(("READY on generation", "EMPTY", "QUARANTINED")), row
        assert restart.startswith(("READY on generation", "EMPTY", "QUARANTINED")), row
        assert "other bytes" not in row["outcome"] or row["fault"] == "other_parent once", row


def test_the_table_has_every_kind_of_fault() -> None:
    faults = {row["fault"] for rows in golden().values() for row in rows}
    assert faults >= {
        "error once", "error always", "flip once", "flip always", "torn once", "lost once", "neighbour once",
        "next_group once", "other_parent once", "kv once", "stale once", "out of memory once", "hang", "device lost",
        "raises, committed", "raises, not committed", "raises, not synced", "journal lost", *FILE_FAULTS,
    }  # fmt: skip
    subjects = {subject for rows in golden().values() for row in rows for subject in row["subjects"].split()}
    assert subjects >= {"embed", "embed:2", "embed:3", "norm:2", "device:2", "undo", "manifests"}, (
        "each write, each read"
    )
    failed = {(row["phase"], row["operation"]) for rows in golden().values() for row in rows}
    assert failed >= {
        ("apply", "write_rows"), ("apply", "fence"), ("verify", "read_rows"), ("restore", "write_rows"),
        ("restore", "fence"), ("restore", "read_rows"), ("restore", "close_runtime"), ("undo_file", "sync"),
        ("undo_file", "rename"), ("undo_file", "sync_directory"), ("publish", "commit_publish"),
        ("drain", "commit_intent"), ("", "read"),
    }  # fmt: skip
