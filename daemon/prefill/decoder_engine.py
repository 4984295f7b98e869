"""Our own decoder as the engine of a source, over one device or over several that each have some of the layers.

On the same kind of processor it gives the K/V, bit by bit, that an owner computes itself. Options: ``partitions``: how
many parts the layers are cut in, dealt out to the devices (``--device a,b``). A device has the weights and the K/V of
its layers, no others: embeddings and head stay on the host. ``pad=1``: compute the padding of a prompt, too, as a
device with programs of fixed lengths has to; it changes nothing that is announced.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from rowlock.bindings.checkpoint.config import program_digest
from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError
from rowlock.bindings.checkpoint.hashing import hash_groups
from rowlock.bindings.checkpoint.manifest import Manifest, TensorManifest
from rowlock.bindings.cpu.threads import HostThreads
from rowlock.bindings.device import Counters
from rowlock.bindings.host_arena import HostArena
from rowlock.bindings.model.cache.geometry import CacheLimits, plan_geometry
from rowlock.bindings.model.cache.paged import PagedCache
from rowlock.bindings.model.cache.table import BlockTable
from rowlock.bindings.model.config import ModelConfig, parse_config
from rowlock.bindings.model.decoder import Decoder, Span
from rowlock.bindings.model.layout import Layout, layout_of
from rowlock.bindings.weights import host_rows
from rowlock.daemon.prefill.engine import Block, EngineError, EngineOptions, States, Work, widths_within
from rowlock.daemon.prefill.fitting import geometry_of
from rowlock.daemon.prefill.protocol.hello import SourceFacts

HOST: Final = "cpu"
"""Any other name is a device beside the host."""
_INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory, and the digests of exactly these bytes."""

    config: ModelConfig
    layout: Layout
    weights: Mapping[str, torch.Tensor]
    program: str
    root: str


@dataclass(frozen=True)
class Part:
    """Consecutive layers on one device.

    Attributes:
        first: layer.
        stop: past the last.
        device: where it computes; None: on the host, with its programs.
        forward: over its weights: spans, layers and what comes before them, to what is behind them.
        table: its own K/V, one page as long as the longest prompt.

    """

    first: int
    stop: int
    device: torch.device | None
    forward: Callable[[Sequence[Span], range, torch.Tensor | None], torch.Tensor]
    table: BlockTable

    def own(self, layers: range) -> range:
        """Layers as its table and its programs number them: those of a device begin at 0."""
        base = 0 if self.device is None else self.first
        return range(layers.start - base, layers.stop - base)


def create(options: EngineOptions) -> DecoderEngine:
    """The factory.

    Raises:
        ValueError: a checkpoint or an option that will not do.

    """
    known = {"partitions", "pad"}
    for name in sorted(options.extra.keys() - known):
        raise ValueError(f"option {name!r}: there are {', '.join(sorted(known))}")
    try:
        loaded = _load(options)
    except CheckpointError as error:
        raise ValueError(f"{error} [{error.fault.value}]") from error
    return DecoderEngine(loaded, options)


class DecoderEngine:
    """See :class:`rowlock.daemon.prefill.engine.Engine`."""

    def __init__(self, loaded: Loaded, options: EngineOptions) -> None:
        config = loaded.config
        widths = widths_within(config.context, options.widths)
        self._pads = options.extra.get("pad", "0") == "1"
        self._host = HostThreads(options.threads, Counters())
        self._programs = self._host.create_decoder(config, loaded.weights)
        self._ends = self._host.create_torch_decoder(config, loaded.weights)
        self._parts = self._cut(loaded, options, widths[-1])
        self.facts = SourceFacts(
            name=f"rowlock decoder on {options.device}, {len(self._parts)} parts, {options.threads} threads",
            program=bytes.fromhex(loaded.program),
            weights=bytes.fromhex(loaded.root),
            geometry=geometry_of(config, loaded.layout),
            heads=config.heads,
            widths=widths,
            streams=True,
            recurrent=False,
        )

    def prefill(self, work: Work) -> Generator[Block, None, States]:
        """See :class:`rowlock.daemon.prefill.engine.Engine`."""
        try:
            return (yield from self._prefill(work))
        except RuntimeError as error:  # of torch: out of memory, or what a device has to say
            raise EngineError(f"{len(work.tokens)} tokens: {error}") from error

    def _prefill(self, work: Work) -> Generator[Block, None, States]:
        self._host.prepare()
        prompt, count = torch.tensor(work.tokens), len(work.tokens)
        for part in self._parts:
            part.table.release()
            part.table.reserve(work.width if self._pads else count)
        for token in range(0, count, work.chunk):
            last = yield from self._run(prompt[token : token + work.chunk], count, work.layers)
        logits = last.cpu()
        if self._pads and work.width > count:
            for _ in self._run(torch.zeros(work.width - count, dtype=torch.long), 1, self.facts.geometry.layers):
                """What is computed of padding goes nowhere."""
        return logits.view(_INTEGERS[logits.itemsize]).numpy()

    def _run(self, tokens: torch.Tensor, prompt: int, layers: int) -> Generator[Block, None, torch.Tensor]:
        """The next tokens through all layers; returns the logits ``[vocab]`` of the last one."""
        found: torch.Tensor | None = None
        for part in self._parts:
            span = Span(tokens, part.table, prompt)
            if part.device is not None:
                found = (self._ends.embed(tokens) if found is None else found).to(part.device)
            elif found is not None:
                found = found.cpu()
            for layer in range(part.first, part.stop, layers):
                piece, token = range(layer, min(layer + layers, part.stop)), part.table.length
                found = part.forward([span], part.own(piece), found)
                yield from self._blocks(part, piece, range(token, token + len(tokens)))
            if part.table.length == token:  # the host's last piece has done so itself
                part.table.advance(len(tokens))
        assert found is not None
        if self._parts[-1].device is not None:
            found = self._ends.head(found[-1:].cpu())
        return found[-1]

    def _blocks(self, part: Part, layers: range, tokens: range) -> Iterator[Block]:
        """What was just computed, as one block for each run of layers of one cache group."""
        cache = part.table.cache
        for first, stop in self.facts.geometry.runs(layers.start, layers.stop):
            group, at = cache.places[part.own(range(first, stop)).start]
            states = cache.groups[group].states[at : at + stop - first, 0, :, :, tokens.start : tokens.stop].cpu()
            yield Block(first, tokens.start, states.view(_INTEGERS[states.itemsize]).numpy())

    def _cut(self, loaded: Loaded, options: EngineOptions, longest: int) -> list[Part]:
        config, parts = loaded.config, int(options.extra.get("partitions", "1"))
        if not 1 <= parts <= config.layers:
            raise ValueError(f"option partitions is {parts}; wanted: 1 to {config.layers}")
        edges = [config.layers * index // parts for index in range(parts + 1)]
        devices = options.device.split(",")
        return [
            self._part(loaded, edges[index], edges[index + 1], devices[index % len(devices)], longest)
            for index in range(parts)
        ]

    def _part(self, loaded: Loaded, first: int, stop: int, name: str, longest: int) -> Part:
        if name == HOST:
            table = _table(loaded.config, loaded, torch.device(HOST), longest)
            return Part(first, stop, None, self._programs.forward_layers, table)
        config = replace(loaded.config, layers=stop - first, windows=loaded.config.windows[first:stop])
        device, weights = torch.device(name), {}
        for parent, rows in loaded.weights.items():
            layer, dot, rest = parent.partition(".")
            if dot and first <= int(layer) < stop:
                weights[f"{int(layer) - first}.{rest}"] = rows.to(device, copy=True)

        def forward(spans: Sequence[Span], layers: range, hidden: torch.Tensor | None) -> torch.Tensor:
            assert hidden is not None, "embeddings are the host's"
            return decoder.run_layers(spans, layers, hidden)

        decoder = Decoder(config, weights)
        return Part(first, stop, device, forward, _table(config, loaded, device, longest))


def _table(config: ModelConfig, loaded: Loaded, device: torch.device, longest: int) -> BlockTable:
    """K/V of the layers of a config: one page of each group."""
    dtype = loaded.weights["embed"].dtype
    planned = plan_geometry(config, dtype.itemsize, CacheLimits(page_tokens=longest), 1 << 62)
    groups = tuple(replace(group, pages=1) for group in planned.groups)
    return BlockTable(PagedCache(config, replace(planned, groups=groups), dtype, device), longest)


def _load(options: EngineOptions) -> Loaded:
    """Read every tensor once, into memory of our own, and digest what is there."""
    with Checkpoint.open(options.checkpoint) as checkpoint:
        config = parse_config(checkpoint.directory, checkpoint.config)
        layout = layout_of(checkpoint, config)
        arena = HostArena()
        images = {name: arena.take(parent) for name, parent in layout.parents.items()}
        tensors = []
        for name, placement in layout.placements.items():
            data = images[placement.parent][placement.offset : placement.offset + placement.tensor.nbytes]
            checkpoint.read_into(name, 0, data)
            digests = hash_groups(data, placement.tensor.group_rows * placement.tensor.row_bytes)
            tensors.append(TensorManifest(placement.tensor, digests))
        checkpoint.check_unchanged()
        weights = {name: host_rows(layout.parents[name], data) for name, data in images.items()}
        return Loaded(config, layout, weights, program_digest(checkpoint.config), Manifest.of(tensors).root)
