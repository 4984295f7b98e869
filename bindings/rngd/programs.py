"""The prepared programs of a model: found, or built by a process of their own, and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from blake3 import blake3

from rowlock.bindings.device import Counters, DeviceError, DeviceFault, never
from rowlock.bindings.rngd.artifacts import Artifact, ArtifactStore
from rowlock.bindings.rngd.builder import Builder
from rowlock.bindings.rngd.engine import Engine
from rowlock.bindings.rngd.program import DecoderProgram, StepInputs, source_digest
from rowlock.bindings.rngd.sdk import Program
from rowlock.bindings.rngd.shape import ModelShape, ProgramSet, ProgramShape
from rowlock.bindings.weights import weight_dtype


@dataclass(frozen=True)
class LoadedProgram:
    """One program, ready to run.

    Attributes:
        digest: of its artifact.

    """

    digest: str
    run: Program


class ProgramKeys:
    """Names artifacts by everything that decides them.

    Args:
        execution: how they will run.
        versions: of the vendor's packages; another version builds again.

    """

    def __init__(self, execution: str, versions: Mapping[str, str]) -> None:
        self._common = {"execution": execution, "versions": dict(versions), "source": source_digest()}

    def key(self, model: ModelShape, shape: ProgramShape) -> str:
        """Hex digest over shapes, program text, versions and execution."""
        content = {**self._common, "model": asdict(model), "shape": asdict(shape)}
        hasher = blake3(derive_key_context="rowlock v1 program key")
        hasher.update(json.dumps(content, sort_keys=True).encode())
        return hasher.hexdigest()


class ProgramCache:
    """The programs that were built, by what decides them. Needs no card.

    Args:
        directory: in which they are kept.
        execution: how they will run.
        versions: of the vendor's packages.

    """

    def __init__(self, directory: Path, execution: str, versions: Mapping[str, str]) -> None:
        self._store = ArtifactStore(directory)
        self._builder = Builder(directory, execution)
        self._keys = ProgramKeys(execution, versions)

    def build(self, wanted: ProgramSet, given_up: Callable[[], bool] = never) -> int:
        """Build what is missing, in another process; how many were. Raises DeviceError: UNSUPPORTED."""
        missing = tuple(shape for shape in wanted.shapes if self._find(wanted.model, shape) is None)
        return self._builder.build(replace(wanted, shapes=missing), given_up) if missing else 0

    def find(self, wanted: ProgramSet) -> dict[ProgramShape, Artifact]:
        """What was built. Raises DeviceError: UNSUPPORTED, naming what is not there."""
        return {shape: self._found(wanted.model, shape) for shape in wanted.shapes}

    def _found(self, model: ModelShape, shape: ProgramShape) -> Artifact:
        found = self._find(model, shape)
        if found is None:
            raise DeviceError(DeviceFault.UNSUPPORTED, f"{shape.name} is not in {self._store.directory} any more")
        return found

    def _find(self, model: ModelShape, shape: ProgramShape) -> Artifact | None:
        return self._store.find(self._keys.key(model, shape))


class ProgramSource:
    """Has programs built, and loads them.

    Args:
        engine: that runs them.
        cache: where they are kept.
        counters: of loads and builds.

    """

    def __init__(self, engine: Engine, cache: ProgramCache, counters: Counters) -> None:
        self._engine = engine
        self._cache = cache
        self.counters = counters

    def build(self, wanted: ProgramSet, given_up: Callable[[], bool] = never) -> None:
        """Build what is missing; may take minutes. Raises DeviceError: UNSUPPORTED."""
        self.counters.compiles += self._cache.build(wanted, given_up)

    def load(self, wanted: ProgramSet) -> dict[ProgramShape, LoadedProgram]:
        """Put what was built where it runs, whatever the weights. Raises DeviceError."""
        loaded = {}
        for shape, artifact in self._cache.find(wanted).items():
            loaded[shape] = LoadedProgram(artifact.digest, self._engine.load(artifact.data))
            self.counters.program_loads += 1
        return loaded


def build_missing(engine: Engine, store: ArtifactStore, keys: ProgramKeys, wanted: ProgramSet) -> list[str]:
    """Build and keep the programs that are not there. The names of those built."""
    built = []
    for shape in wanted.shapes:
        key = keys.key(wanted.model, shape)
        if store.find(key) is None:
            store.put(key, build_program(engine, wanted.model, shape))
            built.append(shape.name)
    return built


def build_program(engine: Engine, model: ModelShape, shape: ProgramShape) -> bytes:
    """The artifact of one program. Weights are inputs: those used here hold nothing."""
    dtype = weight_dtype(model.parents[0])
    example = StepInputs(model.config, dtype).example(model.config, shape)
    weights = tuple(
        torch.empty(parent.rows, parent.row_bytes // dtype.itemsize, dtype=dtype) for parent in model.parents
    )
    module = DecoderProgram(model.config, tuple(parent.name for parent in model.parents))
    return engine.build(module, (*example, *weights))
