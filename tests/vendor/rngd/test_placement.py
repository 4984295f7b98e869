"""Which rows cannot be written in place, by the vendor's own arithmetic of layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import EMBED, K0, NORM, Q0, TINY, change_rows, negate
from support.owners import running_owner

from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import BlockReason, build_layout
from rowlock.bindings.plan import Level, Require
from rowlock.bindings.rngd.placement import PlacementRules, placed, read_rules
from rowlock.daemon.owner.options import Options
from rowlock.v1.errors import OwnerError

LAYOUT = build_layout(parse_config(Path(), TINY), "BF16")
V0 = "model.layers.0.self_attn.v_proj.weight"


def blocked(**rules: Any) -> dict[str, BlockReason]:
    found = placed(LAYOUT, PlacementRules(**rules))
    assert found.parents == LAYOUT.parents
    return {name: item.blocked for name, item in found.placements.items() if item.blocked}


def test_whole_rows_on_one_chip_are_free() -> None:
    assert placed(LAYOUT, PlacementRules()) == LAYOUT


@pytest.mark.parametrize("axes", [((0, 2),), ((0, 4),), ((1, 2),), ((0, 2), (1, 2))])
def test_what_is_split_over_chips_is_blocked_with_all_of_its_parent(axes: tuple[tuple[int, int], ...]) -> None:
    """Rows on other chips, or parts of a row on each: one slice of the whole is not one run of bytes."""
    assert blocked(shards={"0.qkv": axes}) == dict.fromkeys((Q0, K0, V0), BlockReason.LAYOUT)


def test_what_cannot_be_split_like_that_is_blocked() -> None:
    assert blocked(shards={"embed": ((0, 3),)}) == {EMBED: BlockReason.LAYOUT}  # 260 rows


def test_one_part_is_no_split() -> None:
    assert blocked(shards={"embed": ((0, 1),)}) == {}


def test_a_transfer_that_covers_parts_of_rows_is_coarse() -> None:
    hidden, wide = 64 * 2, 160 * 2  # bytes of a row: of most parents, and of down's
    assert blocked(granule_bytes=hidden // 2) == {}
    down = {f"model.layers.{layer}.mlp.down_proj.weight": BlockReason.COARSE for layer in (0, 1)}
    assert blocked(granule_bytes=hidden) == down, f"{wide} is no multiple of {hidden}"
    assert set(blocked(granule_bytes=4096)) == set(LAYOUT.placements)


def test_host_resident_and_scaled_are_named_before_the_layout() -> None:
    found = blocked(host_resident=frozenset({Q0}), scaled=frozenset({NORM}), shards={"0.qkv": ((0, 2),)})
    assert found == {
        Q0: BlockReason.HOST_RESIDENT,
        NORM: BlockReason.SCALED,
        K0: BlockReason.LAYOUT,
        V0: BlockReason.LAYOUT,
    }


@pytest.mark.parametrize(
    ("rules", "tensor", "reason"),
    [
        ({"host_resident": [EMBED]}, EMBED, "HOST_RESIDENT"),
        ({"scaled": [Q0]}, Q0, "SCALED"),
        ({"shards": {"0.qkv": [[0, 2]]}}, K0, "LAYOUT"),
        ({"granule_bytes": 4096}, EMBED, "COARSE"),
    ],
)
def test_a_plan_says_why_and_reloads(
    tmp_path: Path, tiny: Path, rules: dict[str, Any], tensor: str, reason: str
) -> None:
    file = tmp_path / "placement.json"
    file.write_text(json.dumps(rules))
    target = change_rows(tiny, tmp_path / "target", tensor, [1, 2], negate)
    other = change_rows(tiny, tmp_path / "other", "model.layers.1.mlp.up_proj.weight", [1], negate)
    with running_owner(tmp_path / "state", tiny, placement_file=file) as owner:
        resident = owner.owner.view.resident
        assert owner.owner.view.facts.test_options == (f"placement_file={file}",)
        plan, opened = owner.owner.planner.transition(resident, target, Require.AUTO, Options())
        opened.close()
        assert plan.level is Level.B1
        assert [(item.tensor, item.reason.value) for item in plan.blockers] == [(tensor, reason)]
        with pytest.raises(OwnerError, match=reason):
            owner.owner.planner.transition(resident, target, Require.B2, Options())
        record = owner.transition(target)
        assert (record.state, record.level) == ("PUBLISHED", "B1")
        if reason != "COARSE":
            assert owner.transition(other).level == "B1", "what differs from the target is blocked still"


def test_rules_are_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "placement.json"
    file.write_text(json.dumps({"host_resident": ["a"], "shards": {"p": [[0, 2]]}, "granule_bytes": 64}))
    assert read_rules(file) == PlacementRules(frozenset({"a"}), frozenset(), {"p": ((0, 2),)}, 64)
    assert read_rules(None) == PlacementRules()
