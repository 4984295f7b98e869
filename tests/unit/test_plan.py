"""The planner: which level, and why."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from support.checkpoints import EMBED, K0, NORM, Q0, TINY

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.checkpoint.manifest import Manifest, TensorManifest
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import BlockReason, Layout, build_layout
from rowlock.bindings.plan import Level, Model, PlanRefusedError, Require, UndoStore, Verify
from rowlock.bindings.planner import Policy, plan_transition

WIDE = {**TINY, "vocab_size": 2000}  # the embedding has four groups


def model(dtype: str = "BF16", changed: tuple[tuple[str, int], ...] = (), **config: object) -> Model:
    """A model whose group digests are made up; ``changed`` groups differ from the base's."""
    full = {**WIDE, **config}
    layout = build_layout(parse_config(Path(), full), dtype)
    tensors = []
    for name, placement in layout.placements.items():
        info = placement.tensor
        digests = b"".join(bytes([1 if (name, group) in changed else 0]) * 32 for group in range(info.groups))
        tensors.append(TensorManifest(info, digests))
    manifest = Manifest.of(tensors)
    program = "aa" * 32 if not config else "bb" * 32
    return Model(Identity(program, "cc" * 32, manifest.root), manifest, layout, "/somewhere")


def blocked(base: Model, tensor: str, reason: BlockReason) -> Model:
    placements = dict(base.layout.placements)
    placements[tensor] = dataclasses.replace(placements[tensor], blocked=reason)
    return dataclasses.replace(base, layout=Layout(base.layout.parents, placements))


BASE = model()


def plan(resident: Model | None, target: Model, **policy: object):  # type: ignore[no-untyped-def]
    return plan_transition(resident, target, 3, Policy(**policy))  # type: ignore[arg-type]


def test_equal_identities_are_a_noop() -> None:
    result = plan(BASE, model())
    assert (result.level, result.changes, result.undo) == (Level.NOOP, (), UndoStore.NONE)


def test_b2_touches_the_groups_that_differ() -> None:
    result = plan(BASE, model(changed=((EMBED, 1), (EMBED, 3), (Q0, 0))))
    assert result.level is Level.B2
    assert {change.tensor: change.groups for change in result.changes} == {EMBED: (1, 3), Q0: (0,)}
    embed = BASE.manifest.tensors[EMBED].info
    rows = embed.group_rows + (embed.rows - 3 * embed.group_rows)
    assert result.rows_max == rows + BASE.manifest.tensors[Q0].info.rows
    assert result.bytes_max == result.rows_max * 128
    parents = BASE.layout.parents
    assert result.parent_bytes == parents["embed"].nbytes + parents["0.qkv"].nbytes
    assert (result.generation, result.irreversible) == (3, False)


def test_a_summary_counts_groups_and_names_everything_else() -> None:
    found = plan(BASE, model(changed=((EMBED, 1), (EMBED, 3), (Q0, 0))))
    summary = json.loads(json.dumps(found.summary))
    assert {item["tensor"]: item["groups"] for item in summary["changes"]} == {EMBED: 2, Q0: 1}
    left_out = {"from_identity", "to_identity"}
    assert set(summary) == {item.name for item in dataclasses.fields(found)} - left_out | {"digest"}


def test_assets_alone_are_a_b2_of_no_rows() -> None:
    target = dataclasses.replace(BASE, identity=dataclasses.replace(BASE.identity, assets="dd" * 32))
    result = plan(BASE, target)
    assert (result.level, result.changes, result.assets_changed) == (Level.B2, (), True)
    assert result.undo is UndoStore.NONE


@pytest.mark.parametrize(
    "reason", [BlockReason.HOST_RESIDENT, BlockReason.SCALED, BlockReason.COARSE, BlockReason.HEADER]
)
def test_a_blocked_placement_counts_only_when_touched(reason: str) -> None:
    resident = blocked(BASE, Q0, BlockReason(reason))
    untouched = plan(resident, blocked(model(changed=((EMBED, 0),)), Q0, BlockReason(reason)))
    assert untouched.level is Level.B2
    touched = plan(resident, blocked(model(changed=((Q0, 0),)), Q0, BlockReason(reason)))
    assert touched.level is Level.B1
    assert [(item.tensor, item.reason) for item in touched.blockers] == [(Q0, reason)]


def test_other_programs_are_reloaded() -> None:
    result = plan(BASE, model(rope_theta=5.0))
    assert result.level is Level.B1
    assert [item.reason for item in result.blockers] == [BlockReason.PROGRAM_CHANGED]


def test_shape_dtype_missing_and_unexpected_are_named_by_tensor() -> None:
    wider = plan(BASE, model(intermediate_size=320))
    reasons = {(item.tensor, item.reason) for item in wider.blockers}
    assert ("model.layers.0.mlp.up_proj.weight", BlockReason.SHAPE) in reasons
    assert plan(BASE, model(dtype="F32")).blockers[0].reason is BlockReason.DTYPE
    deeper = {item.reason for item in plan(BASE, model(num_hidden_layers=3)).blockers}
    assert BlockReason.UNEXPECTED in deeper
    assert BlockReason.MISSING in {item.reason for item in plan(BASE, model(num_hidden_layers=1)).blockers}


def test_a_placement_that_differs_is_a_layout_blocker() -> None:
    target = model(changed=((K0, 0),))
    moved = dict(target.layout.placements)
    moved[K0] = dataclasses.replace(moved[K0], first_row=0)
    result = plan(BASE, dataclasses.replace(target, layout=Layout(target.layout.parents, moved)))
    assert [item.reason for item in result.blockers] == [BlockReason.LAYOUT]


def test_requirements() -> None:
    target = model(changed=((NORM, 0),))
    assert plan(BASE, target, require=Require.B1).level is Level.B1
    assert plan(BASE, BASE, require=Require.B1).level is Level.B1
    with pytest.raises(PlanRefusedError, match="PROGRAM_CHANGED"):
        plan(BASE, model(rope_theta=5.0), require=Require.B2)
    with pytest.raises(PlanRefusedError, match="empty"):
        plan(None, target, require=Require.B2)


def test_from_empty_is_a_b1_that_loses_nothing() -> None:
    result = plan(None, BASE)
    assert (result.level, result.irreversible, result.from_identity) == (Level.B1, False, None)


def test_a_reload_of_what_cannot_be_rebuilt_is_irreversible() -> None:
    assert plan(BASE, model(rope_theta=5.0), rebuildable=False).irreversible
    assert not plan(BASE, model(rope_theta=5.0), rebuildable=True).irreversible


def test_a_large_undo_stays_in_memory_only_if_the_old_identity_can_be_rebuilt() -> None:
    target = model(changed=((EMBED, 0),))
    assert plan(BASE, target).undo is UndoStore.DURABLE
    assert plan(BASE, target, undo_durable_max=10).undo is UndoStore.MEMORY
    result = plan(BASE, target, undo_durable_max=10, rebuildable=False)
    assert (result.level, [item.reason for item in result.blockers]) == (Level.B1, [BlockReason.COST])


def test_the_digest_covers_what_is_committed_to() -> None:
    target = model(changed=((EMBED, 0),))
    first = plan(BASE, target)
    assert plan(BASE, target).digest == first.digest
    assert plan(BASE, target, compare_bytes_per_s=1e12).digest == first.digest
    assert plan_transition(BASE, target, 4, Policy()).digest != first.digest
    assert plan(BASE, model(changed=((EMBED, 1),))).digest != first.digest


def test_what_is_read_back_and_how_is_part_of_the_plan() -> None:
    target = model(changed=((EMBED, 0),))
    first = plan(BASE, target)
    groups = plan(BASE, target, verify=Verify.GROUPS)
    assert (first.unread_bytes, first.by_digest) == (0, False)
    assert groups.unread_bytes == groups.parent_bytes - groups.bytes_max > 0
    assert groups.digest != first.digest
    tight = plan(BASE, target, image_bytes_max=first.parent_bytes - 1)
    assert tight.by_digest
    assert tight.memory_bytes < first.memory_bytes
    assert tight.predicted_pause_ms > first.predicted_pause_ms
