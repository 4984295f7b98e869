"""The prepared programs of a model: found, or built by a process of their own, and kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from blake3 import blake3

from rowlock.bindings.device import Counters
from rowlock.bindings.rngd.artifacts import ArtifactStore
from rowlock.bindings.rngd.builder import Builder
from rowlock.bindings.rngd.engine import Engine
from rowlock.bindings.rngd.program import DecoderProgram, StepInputs, Variant, prepared_variants, source_digest
from rowlock.bindings.rngd.sdk import Program
from rowlock.bindings.rngd.shape import ModelShape
from rowlock.bindings.weights import weight_dtype


@dataclass(frozen=True)
class LoadedProgram:
    """One variant, ready to run.

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

    def key(self, shape: ModelShape, variant: Variant) -> str:
        """Hex digest over shapes, program text, versions and execution."""
        content = {**self._common, "model": json.loads(shape.to_json()), "variant": asdict(variant)}
        hasher = blake3(derive_key_context="rowlock v1 program key")
        hasher.update(json.dumps(content, sort_keys=True).encode())
        return hasher.hexdigest()


class ProgramSource:
    """Makes the programs of a model, or finds those made before.

    Args:
        engine: that loads them.
        store: where they are kept.
        builder: builds what is missing there.
        keys: their names.
        counters: of loads and builds.

    """

    def __init__(
        self, engine: Engine, store: ArtifactStore, builder: Builder, keys: ProgramKeys, counters: Counters
    ) -> None:
        self._engine = engine
        self._store = store
        self._builder = builder
        self._keys = keys
        self.counters = counters

    def build(self, shape: ModelShape) -> None:
        """Build what is missing. Raises DeviceError: UNSUPPORTED."""
        if any(self._store.find(key) is None for key in self._named(shape).values()):
            self.counters.compiles += self._builder.build(shape)

    def load(self, shape: ModelShape) -> dict[Variant, LoadedProgram]:
        """Every prepared variant, whatever the weights; what was not built before is built now.

        Raises:
            DeviceError: UNSUPPORTED, where one cannot be built.

        """
        self.build(shape)
        loaded = {}
        for variant, key in self._named(shape).items():
            artifact = self._store.find(key)
            assert artifact is not None, f"{variant.name} was built, and is not there"
            loaded[variant] = LoadedProgram(artifact.digest, self._engine.load(artifact.data))
            self.counters.program_loads += 1
        return loaded

    def _named(self, shape: ModelShape) -> dict[Variant, str]:
        return {variant: self._keys.key(shape, variant) for variant in prepared_variants(shape.config)}


def build_missing(engine: Engine, store: ArtifactStore, keys: ProgramKeys, shape: ModelShape) -> list[str]:
    """Build and keep the variants that are not there. The names of those built."""
    built = []
    for variant in prepared_variants(shape.config):
        key = keys.key(shape, variant)
        if store.find(key) is None:
            store.put(key, build_program(engine, shape, variant))
            built.append(variant.name)
    return built


def build_program(engine: Engine, shape: ModelShape, variant: Variant) -> bytes:
    """The artifact of one variant. Weights are inputs: those used here hold nothing."""
    dtype = weight_dtype(shape.parents[0])
    example = StepInputs(shape.config, dtype).example(shape.config, variant)
    weights = tuple(
        torch.empty(parent.rows, parent.row_bytes // dtype.itemsize, dtype=dtype) for parent in shape.parents
    )
    module = DecoderProgram(shape.config, tuple(parent.name for parent in shape.parents))
    return engine.build(module, (*example, *weights))
