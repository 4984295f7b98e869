"""The compiled kernels of the CPU binding, for tests that are about them."""

from __future__ import annotations

import ctypes

import pytest

from rowlock.bindings.cpu.kernel_library import load_kernels


def kernels_or_skip() -> ctypes.CDLL:
    """The kernels; the test is skipped where there are none."""
    library = load_kernels()
    if library is None:
        pytest.skip("no kernels in this installation: no C compiler, or a processor that they are not for")
    return library
