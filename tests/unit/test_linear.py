"""Our product with resident weights: the bits of torch's, whatever the shape and the number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from support.kernels import kernels_or_skip

from rowlock.bindings.cpu.kernel_library import Kernels
from rowlock.bindings.cpu.linear import native_linear

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def natives() -> list[Linear]:
    """The product on one, two and three threads."""
    library = kernels_or_skip()
    return [native_linear(Kernels(library, threads)) for threads in (1, 2, 3)]


@pytest.fixture(scope="module")
def native(natives: list[Linear]) -> Linear:
    return natives[-1]


def cancelling(count: int, outer: int, inner: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and weights whose products sum to zero: what is left shows the order of the additions."""
    random = torch.Generator().manual_seed(seed)
    half = (inner + 1) // 2
    weights, rows = (torch.randn(n, half, generator=random).bfloat16() for n in (outer, count))
    order = torch.randperm(2 * half, generator=random)[:inner]
    return torch.cat([rows, -rows], 1)[:, order].contiguous(), torch.cat([weights, weights], 1)[:, order].contiguous()


@pytest.mark.torch_bits
@pytest.mark.parametrize("inner", [1, 3, 8, 16, 17, 24, 40, 64, 96, 100, 130, 576, 1536, 2048])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
def test_bits_of_torch(natives: list[Linear], inner: int, count: int) -> None:
    rows, weights = cancelling(count, 101, inner, seed=inner * 10 + count)
    for native in natives:
        assert torch.equal(native(rows, weights), F.linear(rows, weights))


@pytest.mark.parametrize("inner", [100, 576])
def test_a_row_does_not_depend_on_its_neighbours(native: Linear, inner: int) -> None:
    rows, weights = cancelling(7, 50, inner, seed=1)
    whole = native(rows, weights)
    for count in (1, 2, 5):
        assert torch.equal(native(rows[:count], weights), whole[:count])


def test_close_to_the_exact_product(native: Linear) -> None:
    random = torch.Generator().manual_seed(2)
    rows, weights = (torch.randn(n, 640, generator=random).bfloat16() for n in (6, 33))
    torch.testing.assert_close(
        native(rows, weights).double(), rows.double() @ weights.double().T, rtol=2**-8, atol=0.02
    )


def test_a_value_that_is_not_finite_stays_so(native: Linear) -> None:
    rows, weights = torch.ones(2, 64).bfloat16(), torch.ones(3, 64).bfloat16()
    rows[1, 5], weights[2, 9] = torch.nan, torch.inf
    result = native(rows, weights)
    assert torch.isnan(result[1]).all()
    assert torch.isinf(result[0, 2])
    assert torch.isfinite(result[0, :2]).all()


def test_many_products_in_a_row(native: Linear) -> None:
    """The pool hands one job after the other to threads that come late: none is lost, none is done twice wrongly."""
    rows, weights = cancelling(2, 600, 64, seed=3)
    first = native(rows, weights)
    for _ in range(3000):
        assert torch.equal(native(rows, weights), first)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a system without affinities")
def test_two_threads_on_one_processor_come_to_an_end(natives: list[Linear]) -> None:
    rows, weights = cancelling(4, 2001, 576, seed=3)
    expected = natives[0](rows, weights)
    allowed = os.sched_getaffinity(0)
    threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    try:
        for processors in ({min(allowed)}, allowed):  # no seat for the workers, then one
            for thread in threads:
                os.sched_setaffinity(thread, processors)
            for native in natives:
                for _ in range(20):
                    assert torch.equal(native(rows, weights), expected)
            assert all(os.sched_getaffinity(thread) == processors for thread in threads), "one stayed where it was put"
    finally:
        for thread in threads:
            os.sched_setaffinity(thread, allowed)
