"""Looking for an ATOM device, from the driver up. Run in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rowlock.bindings.address import DeviceAddress
from rowlock.bindings.atom.binding import AtomBinding
from rowlock.bindings.atom.sdk import RblnModule, load, package_version
from rowlock.bindings.finding import Finding, ask_tool, open_and_look

NODES = Path("/dev")
SYSFS = Path("/sys/class/rebellions")
SMI: Final = ("rbln-smi", "-j")
"""Of the driver's package: every NPU as JSON. The keys are those that public tools read; it has not been run here."""


def probe(address: DeviceAddress, without_hardware: bool) -> Iterator[Finding]:
    """What there is of a device: node, vendor's tool, packages, runtime library, the device itself.

    Args:
        address: of the device.
        without_hardware: a dummy device will do.

    """
    node = NODES / f"rbln{address.physical}"
    there = node.exists() and (SYSFS / node.name).exists()
    yield Finding(
        "driver", there or without_hardware, f"{node}{'' if there else ' is not there: no driver, or no card'}"
    )
    yield ask_tool(SMI, lambda out: _understand(out, node.name))
    yield Finding("torch-rbln", True, package_version())
    try:
        rbln = load()
    except (OSError, ImportError) as error:
        yield Finding("librbln.so", False, _first_sentence(error))
        return
    yield Finding("librbln.so", True, "loaded")
    yield from _device(address, rbln, without_hardware)


def _understand(out: str, node: str) -> tuple[bool, str]:
    """Whether the NPU behind a node is listed, and what is said of it."""
    content = json.loads(out)
    driver = f"driver {content.get('KMD_version', 'unknown')}"
    listed = {npu["device"]: npu for npu in content.get("devices", ()) if "device" in npu}
    if not listed:
        raise ValueError("names no devices")
    if node not in listed:
        return False, f"lists no {node}, but {', '.join(sorted(listed))}; {driver}"
    return True, f"{listed[node].get('name', node)}, {driver}, firmware {listed[node].get('fw_ver', 'unknown')}"


def _device(address: DeviceAddress, rbln: RblnModule, without_hardware: bool) -> Iterator[Finding]:
    if rbln.is_dummy_device() and not without_hardware:
        yield Finding(
            "device", False, "RBLN_DUMMY_DEVICE is set: there is no NPU; unset it, or give --without-hardware"
        )
        return
    if not rbln.is_available():
        yield Finding("device", False, f"the runtime library sees no NPU {address.physical}")
        return
    if not rbln.is_dummy_device():
        properties = rbln.get_device_properties(address.logical)
        yield Finding("npu", True, f"{properties.name}, {properties.total_memory / 1e9:.1f} GB")
    yield from open_and_look(lambda: AtomBinding(address, rbln, threads=1))


def _first_sentence(error: BaseException) -> str:
    """The vendor's messages go on with advice and paths."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[0][:300]
