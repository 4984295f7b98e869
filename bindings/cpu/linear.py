"""Products with resident weights, on kernels of our own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from rowlock.bindings.cpu.kernel_library import Kernels


def native_linear(kernels: Kernels) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A product of rows ``[M, K]`` with weights ``[N, K]`` of one dtype, with the bits of torch's own.

    Other dtypes than bfloat16 are left to torch.
    """

    def linear(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if rows.dtype != torch.bfloat16 or weights.dtype != torch.bfloat16:
            return F.linear(rows, weights)
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
