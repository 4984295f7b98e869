"""torch-rbln, as far as it is used. The only file that imports it; see docs/vendor-private-api.md."""

from __future__ import annotations

from importlib.metadata import version
from typing import ClassVar, Final, Protocol

import torch

DISTRIBUTION: Final = "torch-rbln"


class DeviceProperties(Protocol):
    """Of one logical device."""

    VENDOR: ClassVar[str] = "torch.rbln.DeviceProperties"
    name: str
    total_memory: int


class RblnModule(Protocol):
    """The module ``torch.rbln``. Devices are given by logical number."""

    VENDOR: ClassVar[str] = "torch.rbln"

    def is_available(self) -> bool:
        """Whether a device can be used; never raises. True for a dummy device too."""
        ...

    def is_dummy_device(self) -> bool:
        """Whether tensors live in host memory, with no NPU behind them."""
        ...

    def get_device_properties(self, device: int) -> DeviceProperties:
        """Raises RuntimeError for a dummy device."""
        ...

    def synchronize(self, device: int) -> None:
        """Wait for all copies and streams of a device."""
        ...

    def memory_allocated(self, device: int) -> int:
        """Bytes that this process holds, as the vendor's allocator counts them."""
        ...


def load() -> RblnModule:
    """Load the package and its runtime library ``librbln.so`` into this process.

    Raises:
        FileNotFoundError: the library is not there.
        ImportError: it is of another interface version.
        OSError: it cannot be loaded.

    """
    import torch_rbln  # noqa: F401, PLC0415 - registers itself; nothing of it may be loaded before it is wanted

    module: RblnModule = torch.get_device_module("rbln")
    return module


def package_version() -> str:
    return version(DISTRIBUTION)
