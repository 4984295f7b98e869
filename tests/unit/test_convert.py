"""Conversion from GGUF."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.gguf import _unpermute, convert_gguf, to_bf16


def test_bf16_rounding_is_torchs_for_every_kind_of_value() -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 1_000_000, np.uint32)
    special = np.array([0, 1, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x80000000, 0x3F808000, 0x3F818000], np.uint32)
    values = np.concatenate([bits, special]).view(np.float32)
    ours = to_bf16(values).view(np.int16)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
    finite = ~np.isnan(values)
    assert np.array_equal(ours[finite], theirs[finite])
    assert torch.from_numpy(ours[~finite]).view(torch.bfloat16).isnan().all()


def test_unpermute_undoes_llama_cpps_permutation() -> None:
    heads, head_dim, columns = 3, 8, 5
    original = np.arange(heads * head_dim * columns, dtype=np.float32).reshape(-1, columns)
    permuted = original.reshape(heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(-1, columns)
    assert not np.array_equal(permuted, original)
    assert np.array_equal(_unpermute(permuted, heads), original)


def test_what_is_no_gguf_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a gguf file at all")
    with pytest.raises(CheckpointError, match=r"x\.gguf") as caught:
        convert_gguf(tmp_path / "x.gguf", tmp_path / "out", lambda *_: None)
    assert caught.value.fault is CheckpointFault.MALFORMED
    with pytest.raises(CheckpointError) as caught:
        convert_gguf(tmp_path / "absent.gguf", tmp_path / "out", lambda *_: None)
    assert caught.value.fault is CheckpointFault.NOT_FOUND
    assert [item.name for item in tmp_path.iterdir()] == ["x.gguf"]
