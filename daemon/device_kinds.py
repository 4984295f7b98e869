"""One row per kind of device that this version drives.

A vendor's package is imported only below the functions that are named here: a process
that drives one vendor's device never loads another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rowlock.bindings.address import DeviceAddress
from rowlock.bindings.device import Binding, BuiltPrograms, Variant
from rowlock.bindings.finding import Finding
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout
from rowlock.bindings.rngd.shape import BATCH_MAX
from rowlock.daemon.environments import Environment, Visibility
from rowlock.daemon.settings import Settings


@dataclass(frozen=True)
class DeviceKind:
    """One kind of device.

    Attributes:
        numbered: there may be several: the name needs a number.
        open: makes the binding.
        probe: looks whether a device is there, honestly, as far as it can be known; it may abort the
            process, and so is run in one of its own. Its second argument says that the binding will
            do without hardware. None where nothing can be missing.
        environment: that it needs, or None for the project's own.
        visibility: how its library is shown one device only; None where the library has no way.
        make_ahead: builds the programs of a model for the variants that are given, without the device. None where
            there is nothing to build: any shape runs at any time, or graphs come compiled.
        batch_max: see DeviceFacts.
        node: of device N, with ``{}`` for N; None where there is none. What is there is locked, beside our own file.

    """

    numbered: bool
    open: Callable[[DeviceAddress, Settings], Binding]
    probe: Callable[[DeviceAddress, bool], Iterator[Finding]] | None = None
    environment: Environment | None = None
    visibility: Visibility | None = None
    make_ahead: Callable[[Settings, ModelConfig, Layout, tuple[Variant, ...]], BuiltPrograms] | None = None
    batch_max: int = 0
    node: str | None = None

    def node_of(self, address: DeviceAddress) -> Path | None:
        """The device's node, which need not be there."""
        return Path(self.node.format(address.physical)) if self.node else None


def _open_cpu(_address: DeviceAddress, settings: Settings) -> Binding:
    from rowlock.bindings.cpu.binding import CpuBinding  # noqa: PLC0415 - see the module's text

    return CpuBinding(settings.threads, settings.fault_file, settings.cache)


def _open_cuda(address: DeviceAddress, settings: Settings) -> Binding:
    from rowlock.bindings.cuda.binding import CudaBinding  # noqa: PLC0415 - see the module's text

    return CudaBinding(address, settings.threads, settings.fault_file, settings.cache)


def _probe_cuda(address: DeviceAddress, _without_hardware: bool) -> Iterator[Finding]:
    from rowlock.bindings.cuda.probe import probe  # noqa: PLC0415 - see the module's text

    return probe(address)


def _open_atom(address: DeviceAddress, settings: Settings) -> Binding:
    from rowlock.bindings.atom.binding import AtomBinding  # noqa: PLC0415 - see the module's text
    from rowlock.bindings.atom.sdk import load  # noqa: PLC0415

    return AtomBinding(address, load(), settings.threads, settings.fault_file, settings.cache)


def _probe_atom(address: DeviceAddress, without_hardware: bool) -> Iterator[Finding]:
    from rowlock.bindings.atom.probe import probe  # noqa: PLC0415 - see the module's text

    return probe(address, without_hardware)


def _open_rngd(address: DeviceAddress, settings: Settings) -> Binding:
    from rowlock.bindings.rngd.binding import open_rngd  # noqa: PLC0415 - see the module's text

    return open_rngd(
        address,
        _programs_of(settings),
        without_hardware=settings.without_hardware,
        fault_file=settings.fault_file,
        placement_file=settings.placement_file,
    )


def _make_ahead_rngd(
    settings: Settings, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...]
) -> BuiltPrograms:
    from rowlock.bindings.rngd.binding import make_ahead  # noqa: PLC0415 - see the module's text

    return make_ahead(_programs_of(settings), config, layout, variants, without_hardware=settings.without_hardware)


def _programs_of(settings: Settings) -> Path:
    return settings.programs or settings.state / "programs"


def _probe_rngd(address: DeviceAddress, without_hardware: bool) -> Iterator[Finding]:
    from rowlock.bindings.rngd.probe import probe  # noqa: PLC0415 - see the module's text

    return probe(address, without_hardware)


DEVICE_KINDS: Final[Mapping[str, DeviceKind]] = {
    "cpu": DeviceKind(numbered=False, open=_open_cpu),
    "cuda": DeviceKind(
        numbered=True,
        open=_open_cuda,
        probe=_probe_cuda,
        # in this order the numbers are those of nvidia-smi
        visibility=Visibility("CUDA_VISIBLE_DEVICES", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        node="/dev/nvidia{}",
    ),
    "atom": DeviceKind(
        numbered=True,
        open=_open_atom,
        probe=_probe_atom,
        environment=Environment("env-atom", {"torch": "2.13.0", "torch-rbln": "0.12.0"}),
        visibility=Visibility(
            "RBLN_VISIBLE_DEVICES",
            # an allocation is made when it is asked for, and not at its first use: it fails at once or not at all
            {"TORCH_RBLN_EAGER_MALLOC": "1"},
            conflicts=("RBLN_DEVICES", "RBLN_DEVICE_MAP", "RBLN_NPUS_PER_DEVICE"),
        ),
        node="/dev/rbln{}",
    ),
    "rngd": DeviceKind(
        numbered=True,
        open=_open_rngd,
        probe=_probe_rngd,
        # furiosa-torch has no way to hide a card, and its own numbers are the physical ones
        environment=Environment("env-rngd", {"torch": "2.10.0", "furiosa-torch": "2026.4.0"}),
        make_ahead=_make_ahead_rngd,
        batch_max=BATCH_MAX,
        node="/dev/rngd/npu{}mgmt",
    ),
}
