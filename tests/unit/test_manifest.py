"""Digests: every byte counts, encodings cannot be confused, caches cannot lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import EMBED, TINY, change_rows, copy, negate, random_tensors, write_tiny, write_weights

from rowlock.bindings.checkpoint.cache import ManifestCache
from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.hashing import CHUNK_BYTES, Hasher
from rowlock.bindings.checkpoint.manifest import Manifest, ManifestError, TensorManifest
from rowlock.bindings.checkpoint.tensors import GROUP_BYTES, TensorInfo


@pytest.fixture(scope="module")
def hasher() -> Iterator[Hasher]:
    with ThreadPoolExecutor(2) as executor:
        yield Hasher(executor)


def manifest_of(hasher: Hasher, directory: Path) -> Manifest:
    with Checkpoint.open(directory) as checkpoint:
        return hasher.manifest(checkpoint, {})


@given(
    st.lists(st.integers(1, 300), min_size=0, max_size=3) | st.tuples(st.integers(1, 200_000)),
    st.sampled_from(["U8", "BF16", "F32"]),
)
def test_groups_are_the_fewest_rows_that_reach_64_kib(shape: list[int] | tuple[int], dtype: str) -> None:
    info = TensorInfo("t", dtype, tuple(shape))
    spans = [info.group_span(group) for group in range(info.groups)]
    assert [first for first, _ in spans] == [0, *(stop for _, stop in spans[:-1])]
    assert spans[-1][1] == info.rows
    for first, stop in spans[:-1]:
        assert (stop - first) * info.row_bytes >= GROUP_BYTES
        assert (stop - first - 1) * info.row_bytes < GROUP_BYTES


def test_a_vector_is_one_row_of_one_group() -> None:
    info = TensorInfo("t", "F32", (1_000_000,))
    assert (info.rows, info.groups, info.row_bytes) == (1, 1, 4_000_000)


def test_group_digests_are_plain_blake3(hasher: Hasher, tiny: Path) -> None:
    manifest = manifest_of(hasher, tiny)
    with Checkpoint.open(tiny) as checkpoint:
        for name, tensor in manifest.tensors.items():
            data = np.empty(tensor.info.nbytes, np.uint8)
            checkpoint.read_into(name, 0, data)
            for group in range(tensor.info.groups):
                first, stop = tensor.info.group_span(group)
                span = data[first * tensor.info.row_bytes : stop * tensor.info.row_bytes]
                assert tensor.group(group) == blake3(span.tobytes()).digest()


def test_large_tensors_are_digested_the_same_in_pieces(hasher: Hasher, tiny: Path, tmp_path: Path) -> None:
    info = TensorInfo("t", "BF16", (10_000, 500))
    data = np.random.default_rng(0).integers(0, 255, info.nbytes, np.uint8).tobytes()
    assert len(data) > 2 * CHUNK_BYTES
    directory = copy(tiny, tmp_path / "large")
    write_weights(directory, {info: data})
    expected = b"".join(
        blake3(data[first * 1000 : stop * 1000]).digest() for first, stop in map(info.group_span, range(info.groups))
    )
    assert manifest_of(hasher, directory).tensors["t"].digests == expected


def test_one_changed_row_changes_one_group_and_the_root(hasher: Hasher, tiny: Path, tmp_path: Path) -> None:
    base = manifest_of(hasher, tiny)
    target = manifest_of(hasher, change_rows(tiny, tmp_path / "t", EMBED, [7], negate))
    assert base.root != target.root
    changed = {name: base.tensors[name].differing_groups(target.tensors[name]) for name in base.tensors}
    assert {name: groups for name, groups in changed.items() if groups} == {EMBED: [0]}


def test_name_dtype_and_shape_are_part_of_a_tensor_digest() -> None:
    digests = bytes(32)
    same_bytes = [
        TensorInfo("a", "BF16", (4, 8)),
        TensorInfo("b", "BF16", (4, 8)),
        TensorInfo("a", "F16", (4, 8)),
        TensorInfo("a", "BF16", (8, 4)),
        TensorInfo("a", "BF16", (1, 4, 8)),
    ]
    assert len({TensorManifest(info, digests).digest for info in same_bytes}) == len(same_bytes)


def test_the_root_is_that_of_the_content_not_of_the_files(hasher: Hasher, tiny: Path, tmp_path: Path) -> None:
    """Shard layout and order in the file do not matter."""
    directory = copy(tiny, tmp_path / "reordered")
    write_weights(directory, dict(reversed(list(random_tensors(TINY, seed=0).items()))))
    assert manifest_of(hasher, directory).root == manifest_of(hasher, tiny).root


def test_an_equal_alias_is_left_out_and_another_refused(hasher: Hasher, tmp_path: Path) -> None:
    directory = write_tiny(tmp_path / "tied")
    tensors = random_tensors(TINY, seed=0)
    embed = next(info for info in tensors if info.name == EMBED)
    alone = manifest_of(hasher, directory).root
    aliases = {"lm_head.weight": EMBED}
    for data, equal in ((tensors[embed], True), (negate(tensors[embed]), False)):
        write_weights(directory, {**tensors, TensorInfo("lm_head.weight", "BF16", embed.shape): data})
        with Checkpoint.open(directory) as checkpoint:
            if equal:
                assert hasher.manifest(checkpoint, aliases).root == alone
            else:
                with pytest.raises(CheckpointError, match=r"lm_head.weight") as caught:
                    hasher.manifest(checkpoint, aliases)
                assert caught.value.fault is CheckpointFault.ALIAS


def test_serialised_and_parsed_is_the_same(hasher: Hasher, tiny: Path) -> None:
    with Checkpoint.open(tiny) as checkpoint:
        manifest = hasher.manifest(checkpoint, {})
        parsed, stamps = Manifest.parse(tiny, manifest.serialise(checkpoint.stamps))
        assert parsed == manifest
        assert stamps == checkpoint.stamps
        assert parsed.root == manifest.root


@given(st.data())
def test_a_damaged_manifest_is_refused_or_unchanged(data: st.DataObject) -> None:
    info = TensorInfo("t", "U8", (300, 1000))
    manifest = Manifest.of([TensorManifest(info, bytes(range(32)) * info.groups)])
    raw = bytearray(manifest.serialise())
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        parsed, _ = Manifest.parse(Path("m"), bytes(raw))
    except ManifestError:
        return
    assert parsed.root == manifest.root


def test_a_cached_manifest_is_for_these_very_files(hasher: Hasher, tiny: Path, tmp_path: Path) -> None:
    directory = copy(tiny, tmp_path / "c")
    cache = ManifestCache(
        tmp_path / "cache",
        Path.read_bytes,
        lambda path, data: (path.parent.mkdir(exist_ok=True), path.write_bytes(data)),
    )
    with Checkpoint.open(directory) as checkpoint:
        assert cache.find(checkpoint) is None
        cache.store(checkpoint, hasher.manifest(checkpoint, {}))
        assert cache.find(checkpoint) is not None
    status = (directory / "model.safetensors").stat()
    with open(directory / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"!")
    # even with size and modification time put back, the status-change time tells
    os.utime(directory / "model.safetensors", ns=(status.st_atime_ns, status.st_mtime_ns))
    with Checkpoint.open(directory) as checkpoint:
        assert cache.find(checkpoint) is None


def test_reading_reports_every_byte_once(hasher: Hasher, tiny: Path) -> None:
    counts: list[int] = []
    with Checkpoint.open(tiny) as checkpoint:
        hasher.manifest(checkpoint, {}, counts.append)
        assert sum(counts) == sum(info.nbytes for info in checkpoint.tensors.values())


def test_rows_of_some_groups_are_those_of_their_spans() -> None:
    info = TensorInfo("w", "BF16", (1000, 576))
    for groups in ([], [0], [0, 3, 5], [info.groups - 1], list(range(info.groups))):
        spans = [info.group_span(group) for group in groups]
        assert info.rows_of(groups) == sum(stop - first for first, stop in spans)
