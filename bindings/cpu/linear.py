"""Products with resident weights, on kernels of our own."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rowlock.bindings.cpu.kernel_library import Kernels


def native_linear(kernels: Kernels) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A product of rows ``[M, K]`` with weights ``[N, K]`` in bfloat16, with the bits of torch's own on AVX2."""

    def linear(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        assert rows.dtype == weights.dtype == torch.bfloat16
        rows = rows.contiguous()
        (count, inner), outer = rows.shape, weights.shape[0]
        assert weights.shape[1] == inner
        assert weights.is_contiguous(), "a packed copy would miss what is written to the weights"
        result = torch.empty(count, outer, dtype=torch.bfloat16)
        wide = torch.empty(count * inner, dtype=torch.float32)
        kernels.library.linear(
            kernels.pool, rows.data_ptr(), weights.data_ptr(), result.data_ptr(), wide.data_ptr(),
            count, outer, inner,
        )  # fmt: skip
        return result

    return linear
