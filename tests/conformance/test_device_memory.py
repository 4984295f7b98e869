"""The contract of ``DeviceMemory``, on every binding there is here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.devices import DEVICES

from rowlock.bindings.device import Allocation, Binding, DeviceError, DeviceFault
from rowlock.bindings.model.layout import ParentInfo

PARENT = ParentInfo("p", "BF16", 50, 40)


@pytest.fixture
def binding(device_under_test: str, tmp_path: Path) -> Iterator[Binding]:
    opened = DEVICES[device_under_test].open(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def allocation(binding: Binding) -> Allocation:
    allocation = binding.memory.allocate(PARENT)
    binding.memory.write_rows(allocation, 0, pattern(50))
    binding.memory.fence()
    return allocation


def pattern(rows: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, rows * 40, np.uint8)


def read(binding: Binding, allocation: Allocation, first: int = 0, rows: int = 50) -> np.ndarray:
    out = np.zeros(rows * 40, np.uint8)
    binding.memory.read_rows(allocation, first, out)
    return out


def test_round_trip(binding: Binding, allocation: Allocation) -> None:
    assert np.array_equal(read(binding, allocation), pattern(50))
    assert np.array_equal(read(binding, allocation, 7, 3), pattern(50)[280:400])


@pytest.mark.parametrize(("first", "rows"), [(0, 1), (49, 1), (10, 17), (0, 50)])
def test_exactly_these_rows_change(binding: Binding, allocation: Allocation, first: int, rows: int) -> None:
    new = pattern(rows, seed=2)
    binding.memory.write_rows(allocation, first, new)
    binding.memory.fence()
    expected = pattern(50)
    expected[first * 40 : (first + rows) * 40] = new
    assert np.array_equal(read(binding, allocation), expected)


def test_rows_are_looked_at_in_place_where_memory_is_the_hosts(binding: Binding, allocation: Allocation) -> None:
    before = binding.counters.bytes_read_back
    view = binding.memory.view_rows(allocation, 7, 3)
    assert (view is not None) == binding.facts.host_memory
    if view is None:
        assert binding.counters.bytes_read_back == before
        return
    assert np.array_equal(view, pattern(50)[280:400])
    assert not view.flags.writeable
    assert binding.counters.bytes_read_back == before + 120
    binding.memory.write_rows(allocation, 8, pattern(1, seed=2))
    binding.memory.fence()
    assert np.array_equal(view[40:80], pattern(1, seed=2)), "a copy would not show what is written later"
    with pytest.raises(AssertionError):
        binding.memory.view_rows(allocation, 48, 3)


def test_overlapping_writes_take_effect_in_order(binding: Binding, allocation: Allocation) -> None:
    for seed in (2, 3):
        binding.memory.write_rows(allocation, 5, pattern(10, seed))
    binding.memory.fence()
    assert np.array_equal(read(binding, allocation, 5, 10), pattern(10, 3))


def test_a_write_adopts_nothing(binding: Binding, allocation: Allocation) -> None:
    source = pattern(50, seed=4)
    binding.memory.write_rows(allocation, 0, source)
    binding.memory.fence()
    source[:] = 0
    assert np.array_equal(read(binding, allocation), pattern(50, seed=4))


def test_a_read_shares_nothing(binding: Binding, allocation: Allocation) -> None:
    read(binding, allocation)[:] = 0
    first = read(binding, allocation)
    binding.memory.write_rows(allocation, 0, pattern(50, seed=5))
    binding.memory.fence()
    assert np.array_equal(first, pattern(50)), "a result changed after it was returned"
    first[:] = 0
    assert np.array_equal(read(binding, allocation), pattern(50, seed=5))


def test_allocations_do_not_touch_each_other(binding: Binding, allocation: Allocation) -> None:
    other = binding.memory.allocate(PARENT)
    assert other.id != allocation.id
    binding.memory.write_rows(other, 0, pattern(50, seed=6))
    binding.memory.fence()
    assert np.array_equal(read(binding, allocation), pattern(50))
    binding.memory.release(other)
    assert np.array_equal(read(binding, allocation), pattern(50))


@pytest.mark.parametrize(("first", "nbytes"), [(50, 40), (49, 80), (-1, 40), (0, 39), (0, 51 * 40)])
def test_bounds_are_checked_before_any_effect(
    binding: Binding, allocation: Allocation, first: int, nbytes: int
) -> None:
    with pytest.raises(AssertionError):
        binding.memory.write_rows(allocation, first, np.zeros(nbytes, np.uint8))
    with pytest.raises(AssertionError):
        binding.memory.read_rows(allocation, first, np.zeros(nbytes, np.uint8))
    assert np.array_equal(read(binding, allocation), pattern(50))


def test_one_fence_ends_all_that_was_started(binding: Binding, allocation: Allocation) -> None:
    other = binding.memory.allocate(PARENT)
    for row in range(50):
        binding.memory.write_rows(allocation, row, pattern(50, seed=7)[row * 40 : (row + 1) * 40])
        binding.memory.write_rows(other, 49 - row, pattern(50, seed=8)[(49 - row) * 40 : (50 - row) * 40])
    binding.memory.fence()
    assert np.array_equal(read(binding, allocation), pattern(50, seed=7))
    assert np.array_equal(read(binding, other), pattern(50, seed=8))
    binding.memory.fence()  # nothing was started: it returns
    assert np.array_equal(read(binding, allocation), pattern(50, seed=7))


def test_ids_are_never_used_again(binding: Binding) -> None:
    ids = set()
    for _ in range(20):
        allocation = binding.memory.allocate(PARENT)
        ids.add(allocation.id)
        binding.memory.release(allocation)
    assert len(ids) == 20


def test_what_is_released_is_gone(binding: Binding, allocation: Allocation) -> None:
    binding.memory.release(allocation)
    with pytest.raises(AssertionError):
        binding.memory.release(allocation)
    with pytest.raises(AssertionError):
        read(binding, allocation)


def test_out_of_memory_leaves_nothing(binding: Binding, allocation: Allocation) -> None:
    before = binding.counters.snapshot()
    with pytest.raises(DeviceError) as caught:
        binding.memory.allocate(ParentInfo("huge", "BF16", 2**40, 2**20))
    assert caught.value.fault is DeviceFault.OUT_OF_MEMORY
    assert binding.counters.allocations == before.allocations
    assert np.array_equal(read(binding, allocation), pattern(50))


def test_close_is_idempotent(binding: Binding, allocation: Allocation) -> None:
    binding.memory.close()
    binding.memory.close()
    with pytest.raises(AssertionError):
        read(binding, allocation)


def test_a_probe_changes_nothing(binding: Binding, allocation: Allocation) -> None:
    binding.memory.write_rows(allocation, 3, pattern(2, seed=9))
    before = binding.counters.snapshot()
    binding.memory.probe()
    change = binding.counters.since(before)
    assert (change.bytes_written, change.allocations, change.program_loads) == (0, 0, 0)
    binding.memory.fence()
    expected = pattern(50)
    expected[120:200] = pattern(2, seed=9)
    assert np.array_equal(read(binding, allocation), expected), "what was under way is not disturbed"


def test_counters_count(binding: Binding, allocation: Allocation) -> None:
    before = binding.counters.snapshot()
    binding.memory.write_rows(allocation, 3, pattern(2))
    binding.memory.fence()
    read(binding, allocation, 0, 5)
    change = binding.counters.since(before)
    assert (change.bytes_written, change.bytes_read_back) == (80, 200)
    assert change.native_calls == 3
    assert (change.uploads, change.allocations, change.compiles, change.program_loads) == (0, 0, 0, 0)
