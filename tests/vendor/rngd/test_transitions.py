"""B2, rollback and B1 of a whole owner in reference execution."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.checkpoints import EMBED, K0, NORM, Q0, change_rows, negate, write_tiny
from support.owners import OwnerHarness, running_owner
from support.reference import cpu_tokens
from support.rngd import SHORT, build_programs, digests, load, negate_f32, opened

from rowlock.bindings.plan import Require
from rowlock.bindings.rngd.builder import Builder
from rowlock.bindings.rngd.shape import ProgramSet

PROMPT = tuple(b"hello")
UP1 = "model.layers.1.mlp.up_proj.weight"


def answer(owner: OwnerHarness) -> list[int]:
    return owner.ask(PROMPT, 12).wait()


def answers(owner: OwnerHarness) -> list[list[int]]:
    """Of prompts of one token, of a few, and of more than one piece."""
    return [owner.ask(prompt, 12).wait() for prompt in ((5,), PROMPT, tuple(range(130)))]


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


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_rows_rollback_and_reload_answer_as_fresh_loads(dtype: str, programs: Path, tmp_path: Path) -> None:
    """Whatever the rounding: the same programs over the same bytes, however the bytes came there."""
    change = {"F32": negate_f32, "BF16": negate}[dtype]
    base = write_tiny(tmp_path / "base", dtype=dtype, **SHORT)
    build_programs(base, programs)
    target = change_rows(base, tmp_path / "rows", EMBED, list(range(0, 250, 3)), change)
    target = change_rows(target, tmp_path / "target", Q0, list(range(24)), change)
    fresh = {}
    for checkpoint in (base, target):
        with running_owner(tmp_path / f"fresh-{checkpoint.name}", checkpoint) as owner:
            fresh[checkpoint] = answers(owner)
    assert fresh[base] != fresh[target]
    with running_owner(tmp_path / "state", base) as owner:
        assert answers(owner) == fresh[base]
        for level in (Require.B2, Require.B1):
            record = owner.transition(target, level)
            assert (record.state, record.level) == ("PUBLISHED", level.value)
            assert answers(owner) == fresh[target]
            assert owner.rollback().state == "PUBLISHED"
            assert answers(owner) == fresh[base]


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
    source._cache._builder = Builder(tmp_path, "reference", [sys.executable, "-c", "import os; os.abort()"])
    record = owner.transition(target)
    assert (record.state, record.level) == ("FAILED", "B1")
    assert "was ended by SIGABRT" in record.message
    assert identity_of(owner) == identity
    assert answer(owner) == before


def test_programs_are_built_before_the_drain(owner: OwnerHarness, tmp_path: Path) -> None:
    target = write_tiny(tmp_path / "other", dtype="F32", num_hidden_layers=1, **SHORT)
    source, seen, old = owner.core.binding._inner._programs, [], owner.owner.view.resident
    real = source.build

    def build(wanted: ProgramSet, given_up: Callable[[], bool]) -> None:
        seen.append(owner.owner.view.resident)
        real(wanted, given_up)

    source.build = build
    assert owner.transition(target).state == "PUBLISHED"
    assert seen[0] is old, "asked for while the old model was resident"
    assert owner.owner.view.resident is not old
