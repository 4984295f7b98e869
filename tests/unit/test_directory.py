"""Checkpoint directories: single files, shards, and what disagrees."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import TINY, copy, random_tensors, write_tiny, write_weights

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault


def sharded(directory: Path) -> dict[str, str]:
    """Rewrite a tiny checkpoint as two shards; its weight_map."""
    tensors = random_tensors(TINY, seed=0)
    (directory / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {}
    for index, name in enumerate(names):
        part = {info: data for info, data in tensors.items() if (info.name < "model.layers.1") == (index == 0)}
        write_weights(directory, part, name)
        weight_map |= {info.name: name for info in part}
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    directory = write_tiny(tmp_path / "sharded")
    return directory, sharded(directory)


def refused(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    return caught.value


def test_shards_read_like_one_file(shards: tuple[Path, dict[str, str]], tiny: Path) -> None:
    with Checkpoint.open(shards[0]) as parts, Checkpoint.open(tiny) as whole:
        assert parts.tensors == whole.tensors
        for name, info in whole.tensors.items():
            left, right = np.empty(info.nbytes, np.uint8), np.zeros(info.nbytes, np.uint8)
            parts.read_into(name, 0, left)
            whole.read_into(name, 0, right)
            assert np.array_equal(left, right), name


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 3])
def test_an_index_stays_in_its_directory(shards: tuple[Path, dict[str, str]], shard: object) -> None:
    directory, weight_map = shards
    write_index(directory, {**weight_map, "model.norm.weight": shard})
    error = refused(directory)
    assert error.fault is CheckpointFault.INDEX
    assert "model.norm.weight" in str(error)


def test_an_absent_shard_is_named(shards: tuple[Path, dict[str, str]]) -> None:
    directory, weight_map = shards
    (directory / weight_map["model.norm.weight"]).unlink()
    error = refused(directory)
    assert error.fault is CheckpointFault.NOT_FOUND
    assert weight_map["model.norm.weight"] in str(error)


def test_a_tensor_in_two_shards_is_refused(shards: tuple[Path, dict[str, str]]) -> None:
    directory, weight_map = shards
    extra = {info: data for info, data in random_tensors(TINY, 0).items() if info.name == "model.norm.weight"}
    write_weights(directory, extra, "model-00003.safetensors")
    write_index(directory, {**weight_map, "ghost": "model-00003.safetensors"})
    assert refused(directory).fault in {CheckpointFault.DUPLICATE, CheckpointFault.INDEX}


def test_an_index_that_disagrees_with_a_shard_is_refused(shards: tuple[Path, dict[str, str]]) -> None:
    directory, weight_map = shards
    missing = dict(weight_map)
    del missing["model.norm.weight"]
    write_index(directory, missing)
    assert refused(directory).fault is CheckpointFault.INDEX
    write_index(directory, {**weight_map, "ghost": weight_map["model.norm.weight"]})
    assert "ghost" in str(refused(directory))


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": {}}', "{", '{"weight_map": 1, "weight_map": 2}'])
def test_a_broken_index_is_refused(shards: tuple[Path, dict[str, str]], content: str) -> None:
    (shards[0] / "model.safetensors.index.json").write_text(content)
    assert refused(shards[0]).fault is CheckpointFault.INDEX


def test_single_file_beside_index_is_ambiguous(tiny: Path, tmp_path: Path) -> None:
    directory = copy(tiny, tmp_path / "both")
    write_index(directory, {"a": "model.safetensors"})
    assert refused(directory).fault is CheckpointFault.INDEX


@pytest.mark.parametrize(
    ("name", "content"), [("config.json", "{"), ("config.json", "[]"), ("config.json", '{"a":1,"a":2}')]
)
def test_a_broken_config_is_refused(tiny: Path, tmp_path: Path, name: str, content: str) -> None:
    directory = copy(tiny, tmp_path / "broken")
    (directory / name).write_text(content)
    assert refused(directory).fault is CheckpointFault.MALFORMED


def test_absent_things_are_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere").fault is CheckpointFault.NOT_FOUND
    assert "config.json" in str(refused(tmp_path))


def test_reading_is_from_the_file_that_was_opened(tiny: Path, tmp_path: Path) -> None:
    """A file replaced by rename does not change what an open checkpoint reads."""
    directory = copy(tiny, tmp_path / "replaced")
    other = write_tiny(tmp_path / "other", seed=1)
    with Checkpoint.open(directory) as checkpoint:
        before = np.empty(64 * 2, np.uint8)
        checkpoint.read_into("model.norm.weight", 0, before)
        (other / "model.safetensors").rename(directory / "model.safetensors")
        after = np.zeros(64 * 2, np.uint8)
        checkpoint.read_into("model.norm.weight", 0, after)
        assert np.array_equal(before, after)
        checkpoint.check_unchanged()


def test_a_file_written_to_is_noticed(tiny: Path, tmp_path: Path) -> None:
    directory = copy(tiny, tmp_path / "written")
    path = directory / "model.safetensors"
    with Checkpoint.open(directory) as checkpoint:
        with open(path, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"!")
        os.utime(path, ns=(1, 1))
        with pytest.raises(CheckpointError) as caught:
            checkpoint.check_unchanged()
    assert caught.value.fault is CheckpointFault.CHANGED


def test_a_file_cut_short_is_noticed_while_reading(tiny: Path, tmp_path: Path) -> None:
    directory = copy(tiny, tmp_path / "cut")
    with Checkpoint.open(directory) as checkpoint:
        os.truncate(directory / "model.safetensors", 4096)
        out = np.empty(checkpoint.tensors["model.norm.weight"].nbytes, np.uint8)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: ends at byte"):
            checkpoint.read_into("model.norm.weight", 0, out)


def test_descriptors_are_closed(tiny: Path) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    for _ in range(5):
        Checkpoint.open(tiny).close()
    assert count() == before
