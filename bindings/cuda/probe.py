"""Looking for a GPU, from the driver up. Run in a process of its own."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from rowlock.bindings.address import DeviceAddress
from rowlock.bindings.cuda.binding import CudaBinding
from rowlock.bindings.finding import Finding, ask_tool, open_and_look

DRIVER_VERSION: Final = Path("/proc/driver/nvidia/version")
DRIVER_LIBRARY: Final = "libcuda.so.1"
SMI: Final = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
"""Over NVML, NVIDIA's management library. Its numbers are those of ``CUDA_DEVICE_ORDER=PCI_BUS_ID``."""


def probe(address: DeviceAddress) -> Iterator[Finding]:
    """What there is of a device: driver, vendor's tool, torch's build, the device itself."""
    yield _driver()
    yield ask_tool([*SMI, f"--id={address.physical}"], _understand)
    if torch.version.cuda is None:
        yield Finding("torch", False, f"{torch.__version__} is built without CUDA: install a build of it with CUDA")
        return
    yield Finding("torch", True, f"{torch.__version__}, CUDA {torch.version.cuda}")
    count = torch.cuda.device_count()
    if address.logical >= count:
        yield Finding("device", False, f"there is no GPU {address.physical}: {count} can be seen")
        return
    yield from _device(address)


def _understand(out: str) -> tuple[bool, str]:
    name, driver, memory = (item.strip() for item in out.strip().split(","))
    return True, f"{name}, driver {driver}, {memory}"


def _driver() -> Finding:
    try:
        ctypes.CDLL(DRIVER_LIBRARY)
    except OSError as error:
        return Finding("driver", False, f"no NVIDIA driver: {error}")
    text = DRIVER_VERSION.read_text().splitlines()[0] if DRIVER_VERSION.exists() else DRIVER_LIBRARY
    return Finding("driver", True, text)


def _device(address: DeviceAddress) -> Iterator[Finding]:
    properties = torch.cuda.get_device_properties(address.logical)
    yield Finding("gpu", True, f"{properties.name}, {properties.total_memory / 1e9:.1f} GB")
    yield from open_and_look(lambda: CudaBinding(address, threads=1))
