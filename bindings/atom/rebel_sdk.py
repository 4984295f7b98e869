"""rebel-compiler 0.12, as far as it is used. The only file that imports it; see docs/vendor-private-api.md.

The package is not on PyPI: these signatures are those with which optimum-rbln 0.12.0 calls it, and
nothing here has met the package itself.
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar, Protocol

import torch


class CompiledModel(Protocol):
    """A graph, parsed on the host. Freed with its last reference."""

    VENDOR: ClassVar[str] = "rebel.RBLNCompiledModel"


class DeviceRuntime(Protocol):
    """A graph on the device. Freed with its last reference: there is no close."""

    VENDOR: ClassVar[str] = "rebel.Runtime"

    def __call__(self, *inputs: torch.Tensor, **outputs: list[torch.Tensor]) -> Any:
        """Run it: tensors in order, and buffers to fill as ``out``. Returns the outputs."""
        ...


def installed() -> bool:
    """Whether the package can be found; it is not loaded."""
    return importlib.util.find_spec("rebel") is not None


def parse(path: str) -> CompiledModel:
    """Read a graph file into a host object."""
    import rebel  # noqa: PLC0415 - loaded when the first graph is

    model: CompiledModel = rebel.RBLNCompiledModel(path)
    return model


def create(model: CompiledModel, device: int, timeout_s: int) -> DeviceRuntime:
    """Put a graph on a device, by logical number."""
    import rebel  # noqa: PLC0415

    runtime: DeviceRuntime = rebel.Runtime(
        model, tensor_type="pt", device=device, activate_profiler=False, timeout=timeout_s
    )
    return runtime
