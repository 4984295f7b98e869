"""The RNGD binding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rowlock.bindings.address import DeviceAddress
from rowlock.bindings.device import BuiltPrograms, Counters, DeviceFacts, Variant, never
from rowlock.bindings.faults import FaultFile
from rowlock.bindings.memory import RowMemory
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout
from rowlock.bindings.rngd import sdk
from rowlock.bindings.rngd.engine import CardEngine, Engine, ReferenceEngine
from rowlock.bindings.rngd.placement import placed, read_rules
from rowlock.bindings.rngd.programs import ProgramCache, ProgramSource
from rowlock.bindings.rngd.runtime import RngdRuntime
from rowlock.bindings.rngd.shape import BATCH_MAX, ProgramSet
from rowlock.bindings.rngd.storage import RngdDevice


class RngdBinding:
    """See :class:`rowlock.bindings.device.Binding`.

    Args:
        address: the card.
        engine: that runs; opened.
        programs: directory in which built programs are kept.
        fault_file: test option, see :mod:`rowlock.bindings.faults`.
        placement_file: test option, see :mod:`rowlock.bindings.rngd.placement`.

    """

    def __init__(
        self,
        address: DeviceAddress,
        engine: Engine,
        programs: Path,
        fault_file: Path | None = None,
        placement_file: Path | None = None,
    ) -> None:
        self._engine = engine
        self._rules = read_rules(placement_file)
        self.counters = Counters()
        self.memory = RowMemory(self.counters, RngdDevice(engine, FaultFile(fault_file) if fault_file else None))
        options = {"fault_file": fault_file, "placement_file": placement_file}
        self.facts = DeviceFacts(
            device=address.name,
            logical=engine.logical,
            binding="rngd",
            versions=sdk.versions(),
            readback=engine.readback,
            execution=engine.execution,
            batch_max=BATCH_MAX,
            test_options=tuple(f"{name}={path}" for name, path in options.items() if path),
        )
        cache = ProgramCache(programs, engine.execution, self.facts.versions)
        self._programs = ProgramSource(engine, cache, self.counters)

    def place(self, layout: Layout) -> Layout:
        return placed(layout, self._rules)

    def prepare(
        self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...], given_up: Callable[[], bool] = never
    ) -> None:
        self._programs.build(ProgramSet.of(config, layout, variants), given_up)

    def create_runtime(self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...] = ()) -> RngdRuntime:
        return RngdRuntime.create(self.memory, self._engine, self._programs, ProgramSet.of(config, layout, variants))

    def close(self) -> None:
        self.memory.close()


def open_rngd(
    address: DeviceAddress,
    programs: Path,
    *,
    without_hardware: bool,
    fault_file: Path | None = None,
    placement_file: Path | None = None,
) -> RngdBinding:
    """The binding on a card, or in reference execution where none is asked for.

    Raises:
        DeviceError: LOST, when the card is not there.

    """
    sdk.claim_fusion()
    engine = ReferenceEngine() if without_hardware else CardEngine.open(address.logical, programs / "compiler")
    return RngdBinding(address, engine, programs, fault_file, placement_file)


def make_ahead(
    programs: Path, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...], *, without_hardware: bool
) -> BuiltPrograms:
    """Build the programs of a model for these shapes where there need be no card, and no owner.

    Raises:
        DeviceError: UNSUPPORTED.

    """
    sdk.claim_fusion()
    execution = ReferenceEngine.execution if without_hardware else CardEngine.execution
    cache, wanted = ProgramCache(programs, execution, sdk.versions()), ProgramSet.of(config, layout, variants)
    built = cache.build(wanted)
    return BuiltPrograms(programs, {shape.name: item.digest for shape, item in cache.find(wanted).items()}, built)
