"""Staging: exact rows, compared as integers; digests checked on the way."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rowlock.bindings.checkpoint.directory import Bytes
from rowlock.bindings.checkpoint.hashing import hash_groups
from rowlock.bindings.checkpoint.manifest import Manifest, TensorManifest
from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.bindings.device import Allocation
from rowlock.bindings.model.layout import Layout, ParentInfo, Placement
from rowlock.daemon.owner.images import new_images
from rowlock.daemon.owner.stage import Stager
from rowlock.v1.errors import OwnerError, Reason

# Two tensors in one parent, with rows of an odd size: nothing is aligned by luck.
A, B = TensorInfo("a", "BF16", (130, 1001)), TensorInfo("b", "BF16", (77, 1001))
PARENT = ParentInfo("p", "BF16", 207, 2002)
LAYOUT = Layout({"p": PARENT}, {"a": Placement(A, "p", 0), "b": Placement(B, "p", 130)})
ALLOCATIONS = {"p": Allocation("x", PARENT)}


@pytest.fixture(scope="module")
def stager() -> Iterator[Stager]:
    with ThreadPoolExecutor(2) as executor:
        yield Stager(executor)


class MemorySource:
    def __init__(self, tensors: dict[str, Bytes]) -> None:
        self.tensors = tensors
        self.read: list[tuple[str, int, int]] = []

    def read_into(self, tensor: str, offset: int, out: Bytes) -> None:
        self.read.append((tensor, offset, out.nbytes))
        out[...] = self.tensors[tensor][offset : offset + out.nbytes]

    def close(self) -> None:
        pass


def random_tensors(seed: int) -> dict[str, Bytes]:
    random = np.random.default_rng(seed)
    return {info.name: random.integers(0, 256, info.nbytes, np.uint8) for info in (A, B)}


def manifest_of(tensors: dict[str, Bytes]) -> Manifest:
    return Manifest.of(
        TensorManifest(info, hash_groups(tensors[info.name], info.group_rows * info.row_bytes)) for info in (A, B)
    )


def image_of(tensors: dict[str, Bytes]) -> dict[str, Bytes]:
    return {"p": np.concatenate([tensors["a"], tensors["b"]])}


@given(rows=st.sets(st.integers(0, 206)), bits=st.integers(0, 2002 * 8 - 1))
def test_b2_stages_expects_and_narrows_exactly(stager: Stager, rows: set[int], bits: int) -> None:
    old = random_tensors(0)
    before = image_of(old)
    wanted = before["p"].copy()
    for row in rows:
        wanted[row * 2002 + bits // 8] ^= np.uint8(1 << bits % 8)
    new = {"a": wanted[: A.nbytes].copy(), "b": wanted[A.nbytes :].copy()}
    target = manifest_of(new)
    changed = {
        name: groups
        for name, tensor in manifest_of(old).tensors.items()
        if (groups := tensor.differing_groups(target.tensors[name]))
    }
    expected = new_images(LAYOUT, ["p"])
    expected["p"][:] = 0xAA
    source = MemorySource(new)
    stager.stage(source, target, LAYOUT, expected, changed, whole=False)
    assert all(offset // (A.group_rows * A.row_bytes) in changed[name] for name, offset, _ in source.read)
    stager.complete(before, expected, LAYOUT, changed)
    assert np.array_equal(expected["p"], wanted)
    assert stager.disagreements(expected, LAYOUT, target) == []
    ranges = stager.differing_rows(before, expected, LAYOUT, changed, ALLOCATIONS)
    found = [row for item in ranges for row in range(item.first_row, item.first_row + item.rows)]
    assert found == sorted(rows)
    for item in ranges:
        assert (item.offset_bytes, item.bytes, item.allocation) == (item.first_row * 2002, item.rows * 2002, "x")
    within = [item for item in ranges if item.first_row + item.rows != 130]
    for left, right in pairwise(within):
        assert left.first_row + left.rows < right.first_row, "neighbours are one write"


def test_nan_and_minus_zero_are_compared_as_bits(stager: Stager) -> None:
    old = random_tensors(0)
    values = old["a"].view(np.uint16).reshape(130, 1001)
    values[5], values[6], values[7] = 0x7FC0, 0x0000, 0x7FC0  # NaN, 0, NaN
    new = {name: data.copy() for name, data in old.items()}
    changed_values = new["a"].view(np.uint16).reshape(130, 1001)
    changed_values[6], changed_values[7] = 0x8000, 0x7FC1  # -0, another NaN
    ranges = stager.differing_rows(
        image_of(old), image_of(new), LAYOUT, {"a": range(A.groups), "b": range(B.groups)}, ALLOCATIONS
    )
    assert [(item.first_row, item.rows) for item in ranges] == [(6, 2)]


@pytest.mark.parametrize("whole", [True, False])
def test_a_byte_that_is_not_the_manifests_is_refused(stager: Stager, whole: bool) -> None:
    tensors = random_tensors(0)
    manifest = manifest_of(tensors)
    tensors["a"][50 * 2002] ^= 1  # row 50 is in group 1 of a
    group = 50 // A.group_rows
    wanted = {"a": [group]} if not whole else {"b": [0]}
    with pytest.raises(OwnerError, match=r"a: rows 33 to 65") as caught:
        stager.stage(MemorySource(tensors), manifest, LAYOUT, new_images(LAYOUT, ["p"]), wanted, whole=whole)
    assert caught.value.reason is Reason.TARGET_CHANGED


def test_whole_reads_every_byte_once(stager: Stager) -> None:
    tensors = random_tensors(0)
    source = MemorySource(tensors)
    stager.stage(source, manifest_of(tensors), LAYOUT, new_images(LAYOUT, ["p"]), {"a": [1]}, whole=True)
    assert sum(count for _, _, count in source.read) == PARENT.nbytes


def test_disagreements_name_rows(stager: Stager) -> None:
    tensors = random_tensors(0)
    image = image_of(tensors)
    image["p"][(130 + 76) * 2002] ^= 1
    assert stager.disagreements(image, LAYOUT, manifest_of(tensors)) == [("b", 66, 11)]
