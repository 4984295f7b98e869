"""ATOM rows: what the unmodified torch-rbln asks its runtime library for, seen by the stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import standin
from support.devices import DEVICES, device_of_owners

from rowlock.bindings.atom import storage
from rowlock.bindings.atom.storage import BATCH_RANGES_MAX
from rowlock.bindings.device import Allocation, Binding, DeviceError, DeviceFault
from rowlock.bindings.model.layout import ParentInfo

pytestmark = pytest.mark.skipif(
    device_of_owners() is not DEVICES["atom"], reason="ATOM: run `make test-atom`, which has torch-rbln"
)
VENDOR_BATCH = 16
"""Copies that torch-rbln 0.12.0 puts into one call of its runtime library."""
PARENT = ParentInfo("p", "BF16", 5000, 40)


@pytest.fixture
def device(tmp_path: Path) -> standin.StandIn:
    found = standin.loaded()
    found.watch_faults(tmp_path / "fault.json")
    return found


@pytest.fixture
def binding(device: standin.StandIn, tmp_path: Path) -> Iterator[Binding]:
    opened = DEVICES["atom"].open(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def allocation(binding: Binding, device: standin.StandIn) -> Allocation:
    allocation = binding.memory.allocate(PARENT)
    binding.memory.write_rows(allocation, 0, rows(5000))
    binding.memory.fence()
    device.take_log()
    return allocation


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count * 40, np.uint8)


def calls(device: standin.StandIn) -> list[str]:
    """The log, with allocations numbered from the last one made: their numbers grow over the whole run."""
    return [" ".join(word for word in line.split() if not word.startswith("#")) for line in device.take_log()]


def test_a_run_of_rows_is_one_copy_of_exactly_those_bytes(
    binding: Binding, allocation: Allocation, device: standin.StandIn
) -> None:
    binding.memory.write_rows(allocation, 7, rows(3))
    assert calls(device) == [], "nothing is copied before the fence"
    binding.memory.fence()
    assert calls(device) == ["h2v_multi ranges=1", "h2v offset=280 bytes=120", "synchronize device=0"]


def test_many_runs_are_few_batches(binding: Binding, allocation: Allocation, device: standin.StandIn) -> None:
    for row in range(0, 40, 2):
        binding.memory.write_rows(allocation, row, rows(1))
    binding.memory.fence()
    copies = [f"h2v offset={row * 40} bytes=40" for row in range(0, 40, 2)]
    batches = [f"h2v_multi ranges={VENDOR_BATCH}", f"h2v_multi ranges={20 - VENDOR_BATCH}"]
    assert calls(device) == [
        batches[0],
        *copies[:VENDOR_BATCH],
        batches[1],
        *copies[VENDOR_BATCH:],
        "synchronize device=0",
    ]


def test_a_batch_is_bounded_and_order_is_kept(
    binding: Binding, allocation: Allocation, device: standin.StandIn
) -> None:
    for row in range(BATCH_RANGES_MAX + 1):
        binding.memory.write_rows(allocation, row, rows(1))
    assert calls(device).count(f"h2v_multi ranges={VENDOR_BATCH}") == BATCH_RANGES_MAX / VENDOR_BATCH
    binding.memory.write_rows(allocation, BATCH_RANGES_MAX, rows(1, seed=9))
    binding.memory.fence()
    offset = f"h2v offset={BATCH_RANGES_MAX * 40} bytes=40"
    assert calls(device) == ["h2v_multi ranges=1", offset, "h2v_multi ranges=1", offset, "synchronize device=0"]
    out = np.empty(40, np.uint8)
    binding.memory.read_rows(allocation, BATCH_RANGES_MAX, out)
    assert np.array_equal(out, rows(1, seed=9)), "of two writes to a row the later one counts"


def test_a_batch_is_bounded_in_bytes(
    binding: Binding, allocation: Allocation, device: standin.StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "BATCH_BYTES_MAX", 100)
    for row in range(4):
        binding.memory.write_rows(allocation, row, rows(1))
    assert calls(device)[0] == "h2v_multi ranges=3", "the third row reached 100 bytes, the fourth waits"


def test_a_readback_is_one_copy_of_exactly_those_bytes(
    binding: Binding, allocation: Allocation, device: standin.StandIn
) -> None:
    out = np.empty(160, np.uint8)
    binding.memory.read_rows(allocation, 4, out)
    assert calls(device) == ["v2h offset=160 bytes=160"]
    assert np.array_equal(out, rows(5000)[160:320])


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_every_bit_pattern_survives(binding: Binding, device: standin.StandIn, dtype: str) -> None:
    """Not-a-numbers and negative zeros too: a copy that goes through arithmetic would change some."""
    patterns = np.arange(2**16, dtype=np.uint16).view(np.uint8)
    allocation = binding.memory.allocate(ParentInfo("all", dtype, 64, patterns.nbytes // 64))
    binding.memory.write_rows(allocation, 0, patterns)
    binding.memory.fence()
    out = np.empty_like(patterns)
    binding.memory.read_rows(allocation, 0, out)
    assert np.array_equal(out, patterns)
    assert not any("v2v" in line or "zero" in line for line in calls(device))


def test_physical_and_logical_number(binding: Binding) -> None:
    assert (binding.facts.device, binding.facts.logical) == ("atom:1", "rbln:0")
    assert (binding.facts.readback, binding.facts.execution) == ("unproven", "host-reference")
    assert binding.facts.test_options, "a dummy device is said to be one"


def test_the_vendors_library_is_shown_the_physical_device_alone(tmp_path: Path) -> None:
    """In a process of its own: a device is claimed once, at its first use."""
    code = (
        "from pathlib import Path\n"
        "from support import standin\n"
        "from support.devices import DEVICES\n"
        "from rowlock.bindings.model.layout import ParentInfo\n"
        "DEVICES['atom'].open(Path('.')).memory.allocate(ParentInfo('p', 'BF16', 1, 2))\n"
        "print([line for line in standin.loaded().take_log() if line.startswith('register')])"
    )
    assert standin.python(code, cwd=tmp_path) == ["['register device=0 npus=0 of visible=1']"]


def test_a_failed_free_is_found(binding: Binding, device: standin.StandIn, tmp_path: Path) -> None:
    """torch-rbln leaks such memory and only warns: what its allocator still counts tells."""
    allocation = binding.memory.allocate(PARENT)
    (tmp_path / "fault.json").write_text('{"operation": "release", "effect": "error"}')
    with pytest.raises(DeviceError, match=f"still counts {PARENT.nbytes} bytes") as caught:
        binding.memory.release(allocation)
    assert caught.value.fault is DeviceFault.LOST


def test_a_failed_copy_keeps_no_device_memory_alive(
    binding: Binding, allocation: Allocation, device: standin.StandIn, tmp_path: Path
) -> None:
    """The error is kept, as a record would keep it; its frames must not hold views of what it failed on."""
    live = device.live_bytes
    (tmp_path / "fault.json").write_text('{"operation": "write", "effect": "error", "count": 2}')
    binding.memory.write_rows(allocation, 0, rows(2))
    with pytest.raises(DeviceError) as caught:
        binding.memory.fence()
    assert caught.value.fault is DeviceFault.LOST
    binding.memory.release(allocation)
    assert device.live_bytes == live - PARENT.nbytes


def test_torch_rbln_tries_a_failed_batch_again_one_by_one(
    binding: Binding, allocation: Allocation, device: standin.StandIn, tmp_path: Path
) -> None:
    """So a failure that does not last is not seen; the bytes are right, and are read back like any others."""
    (tmp_path / "fault.json").write_text('{"operation": "write", "effect": "error"}')
    for row in (1, 3):
        binding.memory.write_rows(allocation, row, rows(1, seed=row))
    binding.memory.fence()
    copies = ["h2v offset=40 bytes=40", "h2v offset=120 bytes=40"]
    assert calls(device) == ["h2v_multi ranges=2", copies[0], *copies, "synchronize device=0"]


def test_a_failed_synchronise_is_a_failed_fence(
    binding: Binding, allocation: Allocation, device: standin.StandIn, tmp_path: Path
) -> None:
    (tmp_path / "fault.json").write_text('{"operation": "fence", "effect": "error"}')
    with pytest.raises(DeviceError, match="synchronise"):
        binding.memory.fence()
    binding.memory.fence()
