"""The fault seam hits exactly what it is told to."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rowlock.bindings.cpu.binding import CpuBinding
from rowlock.bindings.device import DeviceError
from rowlock.bindings.model.layout import ParentInfo

PARENT = ParentInfo("p", "BF16", 4, 8)
OLD, NEW = np.zeros(32, np.uint8), np.full(32, 255, np.uint8)


def after(tmp_path: Path, writes: int = 1, **fault: object) -> np.ndarray:
    path = tmp_path / "fault.json"
    binding = CpuBinding(1, path)
    allocation = binding.memory.allocate(PARENT)
    binding.memory.write_rows(allocation, 0, OLD)
    path.write_text(json.dumps({"operation": "write", **fault}))
    for _ in range(writes):
        binding.memory.write_rows(allocation, 0, NEW)
    out = np.empty(32, np.uint8)
    binding.memory.read_rows(allocation, 0, out)
    return out


def test_flip_stores_one_bit_wrong(tmp_path: Path) -> None:
    found = after(tmp_path, effect="flip", bit=13)
    assert np.unpackbits(found ^ NEW, bitorder="little").nonzero()[0].tolist() == [13]
    assert not (tmp_path / "fault.json").exists()


def test_what_is_looked_at_in_place_is_one_bit_wrong_too(tmp_path: Path) -> None:
    path = tmp_path / "fault.json"
    binding = CpuBinding(1, path)
    allocation = binding.memory.allocate(PARENT)
    binding.memory.write_rows(allocation, 0, NEW)
    path.write_text(json.dumps({"operation": "read", "effect": "flip", "bit": 13}))
    found = binding.memory.view_rows(allocation, 0, 4)
    assert found is not None
    assert np.unpackbits(found ^ NEW, bitorder="little").nonzero()[0].tolist() == [13]
    again = binding.memory.view_rows(allocation, 0, 4)
    assert np.array_equal(again, NEW)


def test_torn_stores_the_first_half(tmp_path: Path) -> None:
    assert after(tmp_path, effect="torn").tolist() == [255] * 16 + [0] * 16


def test_skip_and_count(tmp_path: Path) -> None:
    assert np.array_equal(after(tmp_path, writes=2, effect="flip", skip=2), NEW)
    assert (tmp_path / "fault.json").exists()
    assert not np.array_equal(after(tmp_path, writes=2, effect="flip", skip=1), NEW)


def test_error_raises(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="injected"):
        after(tmp_path, effect="error")
