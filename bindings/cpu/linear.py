"""Products with resident weights on host threads, from ``kernels/``.

torch's own bfloat16 product is used where it has the processor's bfloat16 instructions to
use. On AVX2 it runs at a third of memory speed on one row, no faster per row on more, and all its threads wait for
each other at a barrier: one that the kernel has set aside holds up every layer. There these kernels are
used, which give the same bits; see ``kernels/linear.c``.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows ``[M, K]`` times weights ``[N, K]``, as ``[M, N]``, all of one dtype."""


def choose_linear(threads: int) -> Linear:
    """The quicker product on this machine, on so many threads."""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        return F.linear
    library = load_kernels()
    return F.linear if library is None else NativeLinear(library, threads)


def load_kernels() -> ctypes.CDLL | None:
    """The compiled kernels; None when this installation has none, or this machine cannot run them."""
    spec = importlib.util.find_spec("rowlock.bindings.cpu._kernels")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    library.pool_create.argtypes = [ctypes.c_int]
    library.pool_create.restype = ctypes.c_void_p
    library.pool_destroy.argtypes = [ctypes.c_void_p]
    library.pool_destroy.restype = None
    library.linear.argtypes = [ctypes.c_void_p, ctypes.c_int, *[ctypes.c_void_p] * 4, *[ctypes.c_long] * 3]
    library.linear.restype = None
    return library if library.linear_supported() else None


class NativeLinear:
    """A :data:`Linear` on a pool of threads of its own. One caller at a time.

    Attributes:
        width: threads to use, at most those it was made with.

    """

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._library = library
        self._pool = library.pool_create(threads)
        if not self._pool:
            raise MemoryError(f"cannot start {threads} threads")
        self.width = threads

    def __call__(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if rows.dtype != torch.bfloat16 or weights.dtype != torch.bfloat16:
            return F.linear(rows, weights)
        rows = rows.contiguous()
        (count, inner), outer = rows.shape, weights.shape[0]
        assert weights.shape[1] == inner
        assert weights.is_contiguous(), "a packed copy would miss what is written to the weights"
        result = torch.empty(count, outer, dtype=torch.bfloat16)
        wide = torch.empty(count * inner, dtype=torch.float32)
        self._library.linear(
            self._pool, self.width, rows.data_ptr(), weights.data_ptr(), result.data_ptr(), wide.data_ptr(),
            count, outer, inner,
        )  # fmt: skip
        return result

    def __del__(self) -> None:
        self._library.pool_destroy(self._pool)
