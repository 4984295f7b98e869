"""Staging: exact rows, compared as integers; digests checked on the way."""

from __future__ import annotations

import ctypes
import mmap
import re
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import EMBED, NORM, write_tiny

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.hashing import Hasher, hash_groups
from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.checkpoint.manifest import Manifest, TensorManifest
from rowlock.bindings.checkpoint.tensors import Bytes, TensorInfo
from rowlock.bindings.device import Allocation
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import Layout, ParentInfo, Placement, layout_of
from rowlock.bindings.plan import Model
from rowlock.daemon.owner.images import SLICE_BYTES, SLICE_S, Images, StepBudget, new_images, tensor_bytes
from rowlock.daemon.owner.rows import count_nonfinite, new_nonfinite, row_ranges, row_runs
from rowlock.daemon.owner.stage import Stager
from rowlock.daemon.owner.staging import Settled, Staging, parts_of
from rowlock.daemon.staging.apart import ApartStager
from rowlock.daemon.staging.process import StagingProcess
from rowlock.v1.errors import OwnerError, Reason

# Two tensors in one parent, with rows of an odd size: nothing is aligned by luck.
A, B = TensorInfo("a", "BF16", (130, 1001)), TensorInfo("b", "BF16", (77, 1001))
PARENT = ParentInfo("p", "BF16", 207, 2002)
LAYOUT = Layout({"p": PARENT}, {"a": Placement(A, "p", 0), "b": Placement(B, "p", 130)})
ALLOCATIONS = {"p": Allocation("x", PARENT)}


@pytest.fixture(scope="module", params=["here", "apart"])
def stager(request: pytest.FixtureRequest) -> Iterator[Staging]:
    with ThreadPoolExecutor(2) as executor:
        staging = (
            Stager(executor)
            if request.param == "here"
            else ApartStager(StagingProcess(2), executor, StagingProcess.close)
        )
        yield staging
        staging.close()


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


def image_of(stager: Staging, tensors: dict[str, Bytes]) -> Images:
    images = stager.new_images(LAYOUT, ["p"])
    images["p"][:] = np.concatenate([tensors["a"], tensors["b"]])
    return images


def model_of(tensors: dict[str, Bytes]) -> Model:
    manifest = manifest_of(tensors)
    return Model(Identity("00" * 32, "11" * 32, manifest.root), manifest, LAYOUT, "/m")


def settle(stager: Staging, old: dict[str, Bytes], new: dict[str, Bytes], before: Images, expected: Images) -> Settled:
    parts = parts_of("p", model_of(old), model_of(new), changes(old, new))
    return Settled.together(job.result() for job in stager.settle(before, expected, parts, sparse=False))


def changes(old: dict[str, Bytes], new: dict[str, Bytes]) -> dict[str, list[int]]:
    target = manifest_of(new).tensors
    found = {name: tensor.differing_groups(target[name]) for name, tensor in manifest_of(old).tensors.items()}
    return {name: groups for name, groups in found.items() if groups}


@given(rows=st.sets(st.integers(0, 206)), bits=st.integers(0, 2002 * 8 - 1))
def test_b2_stages_expects_and_narrows_exactly(stager: Staging, rows: set[int], bits: int) -> None:
    old = random_tensors(0)
    before = image_of(stager, old)
    wanted = before["p"].copy()
    for row in rows:
        wanted[row * 2002 + bits // 8] ^= np.uint8(1 << bits % 8)
    new = {"a": wanted[: A.nbytes].copy(), "b": wanted[A.nbytes :].copy()}
    expected = stager.new_images(LAYOUT, ["p"])
    expected["p"][:] = 0xAA
    source, changed = MemorySource(new), changes(old, new)
    stager.stage(source, manifest_of(new), LAYOUT, expected, changed, whole=False)
    assert all(offset // (A.group_rows * A.row_bytes) in changed[name] for name, offset, _ in source.read)
    settled = settle(stager, old, new, before, expected)
    assert np.array_equal(expected["p"], wanted)
    assert settled.drift == ()
    ranges = row_ranges(settled.runs, LAYOUT, ALLOCATIONS)
    found = [row for item in ranges for row in range(item.first_row, item.first_row + item.rows)]
    assert found == sorted(rows)
    for item in ranges:
        assert (item.offset_bytes, item.bytes, item.allocation) == (item.first_row * 2002, item.rows * 2002, "x")
    for left, right in pairwise(ranges):
        assert left.first_row + left.rows < right.first_row, "neighbours are one write"


def test_nan_and_minus_zero_are_compared_as_bits() -> None:
    old = random_tensors(0)["a"]
    values = old.view(np.uint16).reshape(130, 1001)
    values[5], values[6], values[7] = 0x7FC0, 0x0000, 0x7FC0  # NaN, 0, NaN
    new = old.copy()
    changed = new.view(np.uint16).reshape(130, 1001)
    changed[6], changed[7] = 0x8000, 0x7FC1  # -0, another NaN
    assert row_runs(A, 0, old, new) == [(6, 2)]
    assert row_runs(A, 6 * 2002, old[6 * 2002 :], new[6 * 2002 :]) == [(6, 2)]


@pytest.mark.parametrize(
    ("dtype", "word", "bad"),
    [
        ("BF16", np.uint16, [0x7F80, 0xFF80, 0x7FC0, 0x7F81]),
        ("F16", np.uint16, [0x7C00, 0xFC00, 0x7E00]),
        ("F32", np.uint32, [0x7F800000, 0xFF800000, 0x7FC00000]),
    ],
)
def test_only_new_values_that_are_not_finite_count(dtype: str, word: type, bad: list[int]) -> None:
    largest = {"BF16": 0x7F7F, "F16": 0x7BFF, "F32": 0x7F7FFFFF}[dtype]
    old = np.array([0, 1, largest, *bad], word)
    assert count_nonfinite(dtype, old.view(np.uint8)) == len(bad)
    assert new_nonfinite(dtype, old.view(np.uint8), old.view(np.uint8)) == 0
    new = old.copy()
    new[:2] = bad[0]
    assert new_nonfinite(dtype, old.view(np.uint8), new.view(np.uint8)) == 2
    assert new_nonfinite(dtype, new.view(np.uint8), old.view(np.uint8)) == 0


def test_a_byte_that_is_not_the_manifests_is_refused(stager: Staging) -> None:
    tensors = random_tensors(0)
    manifest = manifest_of(tensors)
    tensors["a"][50 * 2002] ^= 1  # row 50 is in group 1 of a
    images, wanted = stager.new_images(LAYOUT, ["p"]), {"a": [50 // A.group_rows]}
    with pytest.raises(OwnerError, match=r"a: rows 33 to 65") as caught:
        stager.stage(MemorySource(tensors), manifest, LAYOUT, images, wanted, whole=False)
    assert caught.value.reason is Reason.TARGET_CHANGED


@pytest.mark.parametrize("where", ["here", "apart"])
def test_a_wrong_byte_of_a_file_is_refused_though_its_group_is_not_wanted(where: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as executor, Checkpoint.open(write_tiny(tmp_path / "c")) as checkpoint:
        stager = Stager(executor) if where == "here" else ApartStager(StagingProcess(1), executor, StagingProcess.close)
        found = Hasher(executor).manifest(checkpoint, {})
        layout = layout_of(checkpoint, parse_config(checkpoint.directory, checkpoint.config))
        images = stager.new_images(layout, layout.parents)
        stager.stage(checkpoint, found, layout, images, {EMBED: [0]}, whole=True)
        assert np.array_equal(tensor_bytes(images, layout.placements[EMBED]), content(checkpoint, EMBED))
        last = checkpoint.extents[NORM]
        with last.path.open("r+b") as file:
            file.seek(last.offset)
            byte = file.read(1)
            file.seek(last.offset)
            file.write(bytes([byte[0] ^ 1]))
        stager.stage(checkpoint, found, layout, images, {EMBED: [0]}, whole=False)
        with pytest.raises(OwnerError, match=re.escape(NORM)) as caught:
            stager.stage(checkpoint, found, layout, images, {EMBED: [0]}, whole=True)
        assert caught.value.reason is Reason.TARGET_CHANGED
        stager.close()


def content(checkpoint: Checkpoint, name: str) -> Bytes:
    data = np.empty(checkpoint.tensors[name].nbytes, np.uint8)
    checkpoint.read_into(name, 0, data)
    return data


def test_whole_reads_every_byte_once() -> None:
    tensors = random_tensors(0)
    source = MemorySource(tensors)
    with ThreadPoolExecutor(2) as executor:
        images = new_images(LAYOUT, ["p"])
        Stager(executor).stage(source, manifest_of(tensors), LAYOUT, images, {"a": [1]}, whole=True)
    assert sum(count for _, _, count in source.read) == PARENT.nbytes


@pytest.mark.parametrize(("row", "rows"), [(5, ("a", 0, 33)), (130 + 76, ("b", 66, 11))])
def test_drift_is_found_in_changed_and_unchanged_groups(stager: Staging, row: int, rows: tuple[str, int, int]) -> None:
    old = random_tensors(0)
    new = {name: data.copy() for name, data in old.items()}
    new["a"][0] ^= 1
    before, expected = image_of(stager, old), image_of(stager, new)
    before["p"][row * 2002 + 7] ^= 1
    assert settle(stager, old, new, before, expected).drift == (rows,)


def test_a_step_of_the_owner_is_bounded_in_time_only_beside_decoding() -> None:
    now, decoding = [0.0], [True]
    budget = StepBudget(lambda: now[0], lambda: decoding[0])
    assert not budget.spend(1)
    now[0] = SLICE_S
    assert budget.spend(1), "it holds a step of decoding up"
    decoding[0] = False
    assert not budget.spend(1)
    now[0] = 100 * SLICE_S
    assert not budget.spend(1), "there is nobody to give way to"
    assert budget.spend(SLICE_BYTES), "commands are heard all the same"


def resident_pages(data: Bytes) -> int:
    """How many pages of a buffer are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    start = data.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    length = data.ctypes.data + data.nbytes - start
    pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), pages) == 0
    return sum(page & 1 for page in pages)


LARGE = Layout({"p": ParentInfo("p", "BF16", (5 << 20) // 2002, 2002)}, {})


def test_a_sparse_image_costs_no_memory_until_it_is_touched(stager: Staging) -> None:
    image = stager.new_images(LARGE, ["p"], sparse=True)["p"]
    assert resident_pages(image) == 0
    image[3 << 20] = 1
    assert 0 < resident_pages(image) < 600


def test_an_image_at_hand_needs_no_more_memory() -> None:
    with ThreadPoolExecutor(1) as executor:
        stager = ApartStager(StagingProcess(1), executor, StagingProcess.close)
        images = stager.new_images(LARGE, ["p"])
        assert resident_pages(images["p"]) == 0
        stager.at_hand(images)
        assert resident_pages(images["p"]) == -(-images["p"].nbytes // mmap.PAGESIZE)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        images["p"][:: mmap.PAGESIZE] = 1
        assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 100, "its pages are not in the page table"
        stager.close()
