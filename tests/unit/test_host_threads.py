"""What computes a model on the host, and on how many of torch's threads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.checkpoints import TINY
from support.kernels import kernels_or_skip

from rowlock.bindings.cpu.decode import NativeDecoder
from rowlock.bindings.cpu.threads import HostThreads
from rowlock.bindings.device import Counters
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import build_layout

CONFIG = parse_config(Path(), TINY)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    parents = build_layout(CONFIG, "BF16").parents
    return {name: torch.ones(parent.rows, parent.row_bytes // 2, dtype=dtype) for name, parent in parents.items()}


def test_a_model_of_another_dtype_after_one_in_bfloat16_is_torch_s_on_all_threads() -> None:
    kernels_or_skip()
    host = HostThreads(3, Counters())
    for dtype, threads in ((torch.bfloat16, 1), (torch.float32, 3), (torch.float16, 3), (torch.bfloat16, 1)):
        programs = host.create_decoder(CONFIG, weights(dtype))
        assert isinstance(programs, NativeDecoder) == (dtype == torch.bfloat16)
        assert host.prepare() == 3
        assert torch.get_num_threads() == threads, dtype
