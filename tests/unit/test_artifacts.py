"""Directories of compiled graphs: what is understood of them, and their identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import write_artifact
from support.owners import running_owner

from rowlock.bindings.checkpoint.artifacts import ArtifactDirectory
from rowlock.bindings.checkpoint.errors import CheckpointError
from rowlock.v1.errors import OwnerError, Reason


def program(directory: Path) -> str:
    found = ArtifactDirectory.find(directory)
    assert found is not None
    try:
        return found.artifact.program(found.config)
    finally:
        found.close()


def test_a_checkpoint_is_none(tiny: Path) -> None:
    assert ArtifactDirectory.find(tiny) is None


def test_every_byte_of_graphs_and_settings_is_in_the_identity(tmp_path: Path) -> None:
    base = program(write_artifact(tmp_path / "a"))
    assert program(write_artifact(tmp_path / "b")) == base
    assert program(write_artifact(tmp_path / "c", weights=b"weightz")) != base
    assert program(write_artifact(tmp_path / "d", max_seq_len=128, kvcache_num_blocks=8)) != base
    (tmp_path / "b" / "decoder_batch_1.rbln").write_bytes(b"decoder_batch_1\nweights ")
    assert program(tmp_path / "b") != base


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("batch_size", 2),
        ("logits_to_keep", 0),
        ("max_seq_len", "64"),
        ("max_seq_len", 65),
        ("prefill_chunk_size", 0),
        ("kvcache_block_size", None),
        ("use_attention_mask", True),
        ("use_inputs_embeds", True),
        ("use_lora", True),
        ("use_local_attention", True),
        ("use_position_ids", True),
    ],
)
def test_a_setting_that_asks_for_another_call_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"rbln_config.json: (kvcache_block_size|" + key + ")"):
        program(write_artifact(tmp_path / "a", **{key: value}))


@pytest.mark.parametrize("name", ["prefill.rbln", "decoder_batch_1.rbln", "config.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    directory = write_artifact(tmp_path / "a")
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        program(directory)


@pytest.mark.parametrize("content", ["[]", "{", '{"a": 1, "a": 2}'])
def test_settings_that_are_no_object_are_refused(tmp_path: Path, content: str) -> None:
    directory = write_artifact(tmp_path / "a")
    (directory / "rbln_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"rbln_config.json"):
        program(directory)


def test_another_device_refuses_them(tmp_path: Path, tiny: Path) -> None:
    with running_owner(tmp_path / "state", tiny) as owner:
        with pytest.raises(OwnerError, match=r"compiled for ATOM|rebel-compiler") as caught:
            owner.transition(write_artifact(tmp_path / "a"))
        assert caught.value.reason is Reason.TARGET_INVALID
