"""B2, rollback and B1 of a whole owner in reference execution."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from support.checkpoints import EMBED, K0, NORM, Q0, change_rows, write_tiny
from support.owners import OwnerHarness, running_owner
from support.reference import cpu_tokens
from support.rngd import SHORT, build_programs, digests, load, negate_f32, opened

from rowlock.bindings.plan import Require
from rowlock.bindings.rngd.builder import Builder
from rowlock.bindings.rngd.shape import ModelShape

PROMPT = tuple(b"hello")
UP1 = "model.layers.1.mlp.up_proj.weight"


def answer(owner: OwnerHarness) -> list[int]:
    return owner.ask(PROMPT, 12).wait()


def identity_of(owner: OwnerHarness) -> tuple[dict[str, str], dict[str, str]]:
    """Ids of the allocations and digests of the programs."""
    resident = owner.owner.view.resident
    assert resident is not None
    runtime = resident.runtime
    return {name: item.id for name, item in runtime.allocations.items()}, dict(runtime.programs)


@pytest.mark.parametrize("tensor", [EMBED, Q0, K0, NORM, UP1])
def test_a_b2_changes_bytes_only_and_answers_as_a_fresh_load(
    owner: OwnerHarness, base: Path, programs: Path, tmp_path: Path, tensor: str
) -> None:
    old, identity, artifacts = answer(owner), identity_of(owner), digests(programs)
    rows = {EMBED: sorted(set(old)), NORM: [0]}.get(tensor, list(range(24)))
    target = change_rows(base, tmp_path / "target", tensor, rows, negate_f32)
    record = owner.transition(target, Require.B2)
    assert (record.state, record.level) == ("PUBLISHED", "B2")
    assert record.rows_written == len(rows)
    for name in ("compiles", "program_loads", "allocations", "uploads", "executions"):
        assert record.counters[name] == 0, name
    assert identity_of(owner) == identity
    assert artifacts.items() <= digests(programs).items(), "compiled artifacts changed"
    new = answer(owner)
    assert new != old
    assert owner.verify().ok
    assert new == cpu_tokens(target, PROMPT, len(new))
    with running_owner(tmp_path / "fresh", target) as fresh:
        assert answer(fresh) == new
        assert fresh.identity == owner.identity
    assert owner.rollback().state == "PUBLISHED"
    assert answer(owner) == old
    assert identity_of(owner) == identity
    assert artifacts.items() <= digests(programs).items()


def test_a_b1_loads_the_programs_again_and_builds_none(
    owner: OwnerHarness, base: Path, programs: Path, tmp_path: Path
) -> None:
    target = change_rows(base, tmp_path / "target", UP1, list(range(24)), negate_f32)
    old, identity, artifacts = answer(owner), identity_of(owner), digests(programs)
    record = owner.transition(target, Require.B1)
    assert (record.state, record.level) == ("PUBLISHED", "B1")
    assert record.counters["compiles"] == 0
    assert record.counters["program_loads"] == len(identity[1]) == 2
    assert record.counters["allocations"] == record.counters["uploads"] == len(identity[0])
    after = identity_of(owner)
    assert not set(after[0].values()) & set(identity[0].values()), "every allocation is a new one"
    assert after[1] == identity[1]
    assert artifacts.items() <= digests(programs).items()
    assert answer(owner) != old
    assert owner.rollback().state == "PUBLISHED"
    assert answer(owner) == old


def test_another_model_gets_programs_of_its_own(owner: OwnerHarness, programs: Path, tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "other", dtype="F32", num_hidden_layers=1, **SHORT)
    build_programs(target, programs)
    _, before = identity_of(owner)
    record = owner.transition(target)
    assert (record.state, record.level) == ("PUBLISHED", "B1")
    _, after = identity_of(owner)
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values())


def test_programs_that_are_damaged_are_built_again(base: Path, programs: Path, tmp_path: Path) -> None:
    mine, good = shutil.copytree(programs, tmp_path / "programs"), digests(programs)
    for path in mine.iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    binding = opened(mine)
    load(binding, base)
    assert binding.counters.compiles == 2
    same = [name for name, digest in digests(mine).items() if good[name] == digest]
    assert len(same) == 2, "the same program gives the same bytes"
    binding.close()


def test_programs_that_cannot_be_built_cost_nothing(owner: OwnerHarness, tmp_path: Path) -> None:
    """A reload whose programs fail to build ends before the drain: the old model goes on."""
    target = write_tiny(tmp_path / "other", dtype="F32", hidden_size=32, head_dim=8, **SHORT)
    before, identity = answer(owner), identity_of(owner)
    source = owner.core.binding._inner._programs
    source._builder = Builder(tmp_path, "reference", [sys.executable, "-c", "import os; os.abort()"])
    record = owner.transition(target)
    assert (record.state, record.level) == ("FAILED", "B1")
    assert "was ended by SIGABRT" in record.message
    assert identity_of(owner) == identity
    assert answer(owner) == before


def test_programs_are_built_before_the_drain(owner: OwnerHarness, tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "other", dtype="F32", num_hidden_layers=1, **SHORT)
    source, seen, old = owner.core.binding._inner._programs, [], owner.owner.view.resident
    real = source.build

    def build(shape: ModelShape) -> None:
        seen.append(owner.owner.view.resident)
        real(shape)

    source.build = build
    assert owner.transition(target).state == "PUBLISHED"
    assert seen[0] is old, "asked for while the old model was resident"
    assert owner.owner.view.resident is not old
