"""Host memory for weights, and its bytes as torch tensors without a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.layout import ParentInfo

_DTYPES: Final = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def weight_dtype(parent: ParentInfo) -> torch.dtype:
    return _DTYPES[parent.dtype]


def host_rows(parent: ParentInfo, data: Bytes) -> torch.Tensor:
    """``[rows, columns]`` over ``data``, which holds whole rows of the parent."""
    dtype = weight_dtype(parent)
    return torch.from_numpy(data).view(dtype).view(-1, parent.row_bytes // dtype.itemsize)


def host_free_bytes() -> int:
    """Host memory that could be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, amount = line.partition(":")
        if name == "MemAvailable":
            return int(amount.split()[0]) * 1024
    raise DeviceError(DeviceFault.UNSUPPORTED, "/proc/meminfo does not say how much memory is available")
