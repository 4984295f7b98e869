"""The pinned buffers of the CUDA binding, with a device whose copies end as late as they may."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from rowlock.bindings.address import DeviceAddress
from rowlock.bindings.cuda.probe import probe
from rowlock.bindings.cuda.staging import Staging


class LateCopy:
    """A copy that is made only when somebody waits for it."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy
        self.ended = False

    def synchronize(self) -> None:
        if not self.ended:
            self._copy()
            self.ended = True


def staging(buffers: int = 2, nbytes: int = 8) -> Staging:
    return Staging(torch.zeros(nbytes, dtype=torch.uint8) for _ in range(buffers))


@pytest.mark.parametrize("nbytes", [0, 1, 8, 9, 40])
def test_a_buffer_is_filled_again_only_after_the_copy_out_of_it(nbytes: int) -> None:
    data = np.arange(nbytes, dtype=np.uint8)
    device, copies = np.zeros(nbytes, np.uint8), []

    def start(at: int, piece: torch.Tensor) -> LateCopy:
        copies.append(LateCopy(lambda: np.copyto(device[at : at + len(piece)], piece.numpy())))
        return copies[-1]

    staged = staging()
    staged.send(data, start)
    data[:] = 255
    for copy in copies:
        copy.synchronize()
    assert np.array_equal(device, np.arange(nbytes, dtype=np.uint8))


def test_what_is_received_is_there_on_return() -> None:
    device, out = np.arange(20, dtype=np.uint8), np.zeros(20, np.uint8)

    def start(at: int, piece: torch.Tensor) -> LateCopy:
        return LateCopy(lambda: np.copyto(piece.numpy(), device[at : at + len(piece)]))

    staging().receive(out, start)
    assert np.array_equal(out, device)


def test_receiving_waits_for_what_was_sent_from_the_same_buffer() -> None:
    device = np.zeros(16, np.uint8)

    def write(at: int, piece: torch.Tensor) -> LateCopy:
        return LateCopy(lambda: np.copyto(device[at : at + len(piece)], piece.numpy()))

    def read(at: int, piece: torch.Tensor) -> LateCopy:
        return LateCopy(lambda: np.copyto(piece.numpy(), device[at : at + len(piece)]))

    staged = staging(buffers=1)
    staged.send(np.full(16, 7, np.uint8), write)
    out = np.zeros(16, np.uint8)
    staged.receive(out, read)
    assert out.tolist() == [7] * 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_driver_the_reason_is_said() -> None:
    found = {item.name: item for item in probe(DeviceAddress("cuda", 0, 0))}
    assert not found["driver"].ok
    assert "no NVIDIA driver: libcuda.so.1" in found["driver"].detail


def test_nothing_of_a_gpu_is_needed_to_import_the_binding() -> None:
    code = "import rowlock.bindings.cuda.binding, torch; assert not torch.cuda.is_initialized()"
    subprocess.run([sys.executable, "-c", code], check=True)
