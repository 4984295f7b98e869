"""Compiled graphs as a runtime: weights come with them, so they are loaded whole and never written to.

A graph is parsed on the host and then put on the device. The parsed object outlives a reload: as long as the whole
file (SHA-256) and the settings are the same, the next load puts it on the device without parsing again. One
request owns the graphs, with the K/V inside them, from its first token to its last; others wait.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch

from rowlock.bindings.atom import rebel_sdk
from rowlock.bindings.atom.rebel_sdk import CompiledModel, DeviceRuntime
from rowlock.bindings.checkpoint.artifacts import GRAPHS, Artifact, Graph
from rowlock.bindings.checkpoint.stamps import stamp_of
from rowlock.bindings.device import Allocation, Counters, DeviceError, DeviceFault, Sampling, Sequence, Step, Variant
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.generation import Sampler
from rowlock.bindings.unpaged import Unpaged
from rowlock.bindings.vendor_errors import as_device_error

CALL_TIMEOUT_S: Final = 60


class ParsedGraphs:
    """Host objects of graph files, kept from load to load. One per graph name: the latest."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._kept: dict[str, tuple[str, str, CompiledModel]] = {}

    def get(self, graph: Graph, revision: str) -> CompiledModel:
        """The parsed graph: the kept one if its bytes and settings are the same.

        Raises:
            DeviceError: CORRUPT when the file is not the one that was hashed.

        """
        kept = self._kept.get(graph.name)
        if kept is not None and kept[:2] == (graph.sha256, revision):
            return kept[2]
        self._kept.pop(graph.name, None)
        start = time.monotonic()
        with as_device_error(DeviceFault.CORRUPT, f"parsing {graph.path}"):
            model = rebel_sdk.parse(graph.path)
        _check_unchanged(graph)
        self._counters.parses += 1
        self._counters.parse_us += _microseconds_since(start)
        self._kept[graph.name] = (graph.sha256, revision, model)
        return model

    def close(self) -> None:
        """Free the host objects."""
        self._kept.clear()


def _check_unchanged(graph: Graph) -> None:
    """The library reads a path: what it read must be the file that was hashed."""
    try:
        now = stamp_of(Path(graph.path).stat())
    except OSError as error:
        raise DeviceError(DeviceFault.CORRUPT, f"{graph.path}: {error}") from error
    if now.content_key != graph.stamp.content_key:
        raise DeviceError(DeviceFault.CORRUPT, f"{graph.path}: is not the file any more that was hashed")


class ArtifactSequence:
    """One request. See :class:`rowlock.bindings.device.Sequence`.

    Attributes:
        pending: tokens that the graphs have not seen yet.
        position: of the first of them.

    """

    def __init__(self, runtime: ArtifactRuntime, prompt: tuple[int, ...], sampling: Sampling) -> None:
        self._runtime = runtime
        self.pending = prompt
        self.position = 0
        self.sampler = Sampler(sampling)

    def close(self) -> None:
        self._runtime.leave(self)


class ArtifactRuntime(Unpaged):
    """See :class:`rowlock.bindings.device.Runtime`. It has no allocations that anybody could write to.

    The graphs keep K/V of one sequence, in blocks of their own; the next one waits for them.
    """

    def __init__(
        self, parsed: ParsedGraphs, counters: Counters, artifact: Artifact, config: ModelConfig, device: int
    ) -> None:
        self.allocations: Mapping[str, Allocation] = {}
        self.programs = {graph.name: graph.sha256 for graph in artifact.graphs}
        self._artifact = artifact
        self._config = config
        self._owner: ArtifactSequence | None = None
        self._blocks = torch.arange(artifact.blocks, dtype=torch.int16)
        self._graphs: dict[str, DeviceRuntime] = {}
        try:
            for graph in artifact.graphs:
                model = parsed.get(graph, artifact.revision)
                start = time.monotonic()
                with as_device_error(DeviceFault.OUT_OF_MEMORY, f"creating the device runtime of {graph.name}"):
                    self._graphs[graph.name] = rebel_sdk.create(model, device, CALL_TIMEOUT_S)
                counters.program_loads += 1
                counters.create_us += _microseconds_since(start)
        except BaseException:
            self.close()  # the error's frames would keep what was created alive
            raise

    @property
    def live(self) -> bool:
        """Whether its graphs are on the device."""
        return bool(self._graphs)

    def add_variant(self, variant: Variant) -> None:
        """The shapes were settled when the graphs were compiled; a longer prompt goes through them in pieces."""

    def open_sequence(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> ArtifactSequence:
        assert self._graphs, "the runtime is closed"
        assert capacity <= self._artifact.context, "the request is longer than the compiled context"
        return ArtifactSequence(self, prompt, sampling)

    def advance(self, sequences: list[Sequence]) -> list[Step]:
        """The owner of the graphs goes one step; the others get nothing yet."""
        own = cast(list[ArtifactSequence], sequences)
        if self._owner is None:
            self._owner = own[0]
        return [self._step(sequence) if sequence is self._owner else None for sequence in own]

    def leave(self, sequence: ArtifactSequence) -> None:
        """The request has ended; the next one starts at position 0, and sees nothing of it."""
        if self._owner is sequence:
            self._owner = None

    def close(self) -> None:
        self._owner = None
        self._graphs.clear()

    def _step(self, sequence: ArtifactSequence) -> Step:
        prefilling = sequence.position == 0 or len(sequence.pending) > 1
        chunk = sequence.pending[: self._artifact.chunk] if prefilling else sequence.pending
        with as_device_error(DeviceFault.LOST, "running a graph"):
            logits = self._prefill(sequence, chunk) if prefilling else self._decode(sequence, chunk)
        sequence.position += len(chunk)
        sequence.pending = sequence.pending[len(chunk) :]
        if sequence.pending:
            return None
        try:
            token = sequence.sampler.choose(logits)
        except DeviceError as error:
            return error
        sequence.pending = (token,)
        return token

    def _prefill(self, sequence: ArtifactSequence, chunk: tuple[int, ...]) -> torch.Tensor:
        """Logits ``[vocab]`` of the last token of a chunk, which is padded to the compiled length."""
        size = self._artifact.chunk
        tokens, positions = torch.zeros(1, size, dtype=torch.int64), torch.zeros(1, size, dtype=torch.int32)
        tokens[0, : len(chunk)] = torch.tensor(chunk)
        positions[0, : len(chunk)] = torch.arange(sequence.position, sequence.position + len(chunk))
        last = torch.tensor(len(chunk) - 1, dtype=torch.int16)
        out = torch.zeros(1, 1, self._config.vocab)
        self._graphs[GRAPHS[0]](tokens, positions, self._blocks, last, out=[out])
        return out[0, 0]

    def _decode(self, sequence: ArtifactSequence, chunk: tuple[int, ...]) -> torch.Tensor:
        tokens = torch.tensor([chunk], dtype=torch.int64)
        positions = torch.tensor([[sequence.position]], dtype=torch.int32)
        outputs: Any = self._graphs[GRAPHS[1]](tokens, positions, self._blocks[None])
        logits: torch.Tensor = outputs[0] if isinstance(outputs, list | tuple) else outputs
        return logits.reshape(-1)


def _microseconds_since(start: float) -> int:
    return round((time.monotonic() - start) * 1e6)
