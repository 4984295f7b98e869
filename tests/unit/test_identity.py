"""Identity: three parts, each moved only by what belongs to it."""

from __future__ import annotations

import dataclasses

from support.checkpoints import TINY

from rowlock.bindings.checkpoint.assets import Assets
from rowlock.bindings.checkpoint.config import COSMETIC_KEYS, program_digest
from rowlock.bindings.checkpoint.identity import Identity


def test_cosmetic_keys_and_key_order_do_not_count() -> None:
    base = program_digest(TINY)
    assert program_digest(dict(reversed(TINY.items()))) == base
    for key in COSMETIC_KEYS:
        assert program_digest({**TINY, key: "anything"}) == base


def test_every_other_key_counts() -> None:
    base = program_digest(TINY)
    for key, value in TINY.items():
        changed = not value if isinstance(value, bool) else f"{value}x"
        assert program_digest({**TINY, key: changed}) != base, key
    assert program_digest({**TINY, "new": 1}) != base
    assert program_digest(TINY, (b"artifact",)) != base


def test_asset_names_and_contents_count() -> None:
    digests = {
        Assets(files).digest
        for files in (
            {},
            {"vocab.json": b"a"},
            {"vocab.json": b"b"},
            {"merges.txt": b"a"},
            {"merges.txt": b"a", "vocab.json": b"a"},
            {"merges.txt": b"", "vocab.json": b"aa"},
        )
    }
    assert len(digests) == 6


def test_each_part_moves_the_whole() -> None:
    base = Identity("00" * 32, "11" * 32, "22" * 32)
    others = [dataclasses.replace(base, **{name: "ff" * 32}) for name in ("program", "assets", "weights")]
    assert len({base.digest, *(other.digest for other in others)}) == 4
