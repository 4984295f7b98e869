"""The device boundary: what a binding must do. The comments here are the contract.

Everything is called from the owner thread only, but for ``prepare``. Buffers are contiguous ``uint8`` arrays
in host memory; offsets and sizes are whole rows. A binding turns every vendor error into
a :class:`DeviceError`; nothing else leaves it.

Life of an allocation::

    allocate ──> write_rows / read_rows / fence (any order, any number) ──> release
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from rowlock.bindings.checkpoint.tensors import Bytes
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.layout import Layout, ParentInfo

if TYPE_CHECKING:
    from rowlock.bindings.importing import PromptImporter

WARMUP_TOKENS: Final = 2
"""New tokens of a warmup: the first comes with the prompt, the second is decoded."""


class DeviceFault(StrEnum):
    """What went wrong on the device."""

    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    LOST = "LOST"
    TIMEOUT = "TIMEOUT"
    CORRUPT = "CORRUPT"
    CAPACITY = "CAPACITY"
    UNSUPPORTED = "UNSUPPORTED"


class DeviceError(Exception):
    """A device operation failed. Whether it had an effect is unknown."""

    def __init__(self, fault: DeviceFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass
class Counters:
    """What crossed the device boundary since the binding was opened.

    Attributes:
        uploads: whole allocations filled while loading a model.
        program_loads: programs put on the device.
        compiles: programs compiled.
        allocations: allocations made.
        native_calls: calls into the device library.
        executions: runs of a compiled program.
        bytes_written: host to device.
        bytes_read_back: device to host.
        parses: compiled graphs read into host objects.
        parse_us: microseconds spent on that.
        create_us: microseconds spent on putting parsed graphs on the device.
        workspaces: working memory of programs, made or grown.

    """

    uploads: int = 0
    program_loads: int = 0
    compiles: int = 0
    allocations: int = 0
    native_calls: int = 0
    executions: int = 0
    bytes_written: int = 0
    bytes_read_back: int = 0
    parses: int = 0
    parse_us: int = 0
    create_us: int = 0
    workspaces: int = 0

    def snapshot(self) -> Counters:
        return replace(self)

    def since(self, earlier: Counters) -> Counters:
        before = asdict(earlier)
        return Counters(**{name: value - before[name] for name, value in asdict(self).items()})


@dataclass(frozen=True)
class Allocation:
    """A live device allocation.

    Attributes:
        id: differs from that of every other allocation of this process, dead ones too.
        parent: what it holds.

    """

    id: str
    parent: ParentInfo


@dataclass(frozen=True)
class DeviceFacts:
    """What a binding says of itself.

    Attributes:
        device: e.g. ``cpu``, ``cuda:1``: by its physical number.
        logical: what the vendor's library calls it in this process, e.g. ``rbln:0``.
        binding: name of the binding.
        versions: library name -> version.
        readback: what a readback proves: ``storage`` (the bytes that programs read) or ``unproven``.
        execution: how programs run: ``native``, ``reference`` or ``host-reference``.
        imports: K/V that was computed elsewhere can be imported.
        host_memory: weights lie in host memory: the caller's own thread copies them, and can look at them in place.
        batch_max: requests that a prepared variant may be for; 0: as many as run.
        test_options: fault injection and the like; empty in production.

    """

    device: str
    logical: str
    binding: str
    versions: Mapping[str, str]
    readback: str
    execution: str
    imports: bool = False
    host_memory: bool = False
    batch_max: int = 0
    test_options: tuple[str, ...] = ()


class DeviceMemory(Protocol):
    """Row-addressable device memory."""

    def allocate(self, parent: ParentInfo) -> Allocation:
        """Reserve ``parent.rows * parent.row_bytes`` bytes, content undefined.

        Raises DeviceError(OUT_OF_MEMORY) and leaves nothing behind when it does not fit.
        """
        ...

    def write_rows(self, allocation: Allocation, first_row: int, data: Bytes) -> None:
        """Start copying whole rows from host memory to ``first_row`` on.

        ``data`` is copied, never adopted: the caller may change it after the next fence.
        Exactly these rows change. After an error the content of these rows, and only
        theirs, is undefined. Rows out of bounds are an AssertionError, before any effect.
        """
        ...

    def read_rows(self, allocation: Allocation, first_row: int, out: Bytes) -> None:
        """Copy whole rows from the device into ``out``, which shares storage with nothing.

        Sees every write that was fenced. Returns when ``out`` is complete.
        """
        ...

    def view_rows(self, allocation: Allocation, first_row: int, rows: int) -> Bytes | None:
        """Whole rows where they lie, read-only, where the device's memory is the host's: otherwise None.

        A read like any other; what it returns is the device's own bytes until the next write or release.
        """
        ...

    def fence(self) -> None:
        """Return when everything started before has finished, or raise."""
        ...

    def release(self, allocation: Allocation) -> None:
        """Free an allocation. Releasing one that is not live is an AssertionError."""
        ...

    def close(self) -> None:
        """Release all that is live. Idempotent. May raise; then what is live is unknown."""
        ...

    def probe(self) -> None:
        """Raise DeviceError if the device does not answer. Changes nothing."""
        ...


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen from logits. ``temperature`` 0 is greedy; 0 switches top_k off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0


class Sequence(Protocol):
    """One request's tokens and K/V on the device."""

    def close(self) -> None:
        """Free the K/V. Idempotent."""
        ...


class Preempted(Enum):
    """A sequence had to give its pages up. It keeps its tokens, and computes their K/V again when it next advances."""

    PREEMPTED = "PREEMPTED"


Step = int | None | DeviceError | Preempted
"""What one step gave a sequence: a token; None: none yet; an error that is its own; or it was preempted."""


def never() -> bool:
    """Of a call that nobody gives up."""
    return False


@dataclass(frozen=True)
class Variant:
    """A shape to be ready for.

    Attributes:
        batch: requests that run together.
        length: tokens of each prompt.

    """

    batch: int
    length: int

    @property
    def capacity(self) -> int:
        """Tokens that each sequence grows to while it is warmed up."""
        return self.length + WARMUP_TOKENS

    def __str__(self) -> str:
        return f"batch {self.batch}, length {self.length}"


@dataclass(frozen=True)
class BuiltPrograms:
    """Programs that are ready to be loaded by an owner.

    Attributes:
        directory: where they are kept.
        programs: name -> digest.
        built: how many of them were not there before.

    """

    directory: Path
    programs: Mapping[str, str]
    built: int


@dataclass(frozen=True)
class CacheGroupUse:
    """Pages of the layers that look equally far.

    Attributes:
        window: positions that they look at; 0: all.
        layers: how many.
        pages: that there are.
        free: that hold nothing.
        cached: kept for prompts to come only; taken when they are needed.
        quarantined: never used again.

    """

    window: int
    layers: int
    pages: int
    free: int
    cached: int
    quarantined: int

    @property
    def in_use(self) -> int:
        """Pages of running sequences."""
        return self.pages - self.free - self.cached - self.quarantined


@dataclass(frozen=True)
class CacheUse:
    """Where the K/V of a runtime is. No groups: it has no pages.

    Attributes:
        page_tokens: positions of one page.
        nbytes: of all pages.
        hit_tokens: prompt tokens that were found in pages of earlier prompts.

    """

    page_tokens: int = 0
    nbytes: int = 0
    groups: tuple[CacheGroupUse, ...] = ()
    hit_tokens: int = 0

    @property
    def tokens_max(self) -> int | None:
        """The longest sequence that finds pages in an idle runtime; None where pages do not decide on it."""
        whole = [group.pages - group.quarantined for group in self.groups if not group.window]
        return min(whole) * self.page_tokens if whole else None


class Runtime(Protocol):
    """A resident model: one allocation per parent of its layout, and the programs over them."""

    @property
    def allocations(self) -> Mapping[str, Allocation]:
        """By parent name. The same objects for the life of the runtime."""
        ...

    @property
    def programs(self) -> Mapping[str, str]:
        """Digest of each compiled program, by name: the same for its life, but for what ``add_variant`` adds."""
        ...

    @property
    def importer(self) -> PromptImporter | None:
        """The way in for prompts that were computed elsewhere; None: there is none."""
        ...

    @property
    def cache(self) -> CacheUse:
        """How its K/V is used now."""
        ...

    def add_variant(self, variant: Variant) -> None:
        """Load the programs of a further shape, which ``Binding.prepare`` has made. Touches no weight. Idempotent.

        After a DeviceError the runtime is as before.
        """
        ...

    def open_sequence(self, prompt: tuple[int, ...], sampling: Sampling, capacity: int) -> Sequence:
        """Take a prompt that will grow to ``capacity`` tokens; computes nothing yet.

        Raises DeviceError(CAPACITY), with the numbers, when it could never fit, however idle the runtime is.
        """
        ...

    def has_room(self, *tokens: int) -> bool:
        """Whether sequences that hold nothing yet would now find room for so many tokens each.

        Where nothing runs it would, if it could be opened.
        """
        ...

    def forget(self) -> None:
        """Nothing of earlier prompts is found again. Idempotent, also after ``close``."""
        ...

    def advance(self, sequences: list[Sequence]) -> list[Step]:
        """Run one bounded step: a token each of those that are past their prompts, and a piece of a prompt.

        Args:
            sequences: all that run, the oldest first. When room runs out, the youngest are preempted, never the oldest.

        Every sequence comes to its turn. What it gets does not depend on the others. After an error that is
        raised none of them can go on.

        """
        ...

    def close(self) -> None:
        """Release every allocation. Idempotent. May raise; then what is live is unknown."""
        ...


class Binding(Protocol):
    """One device, opened."""

    @property
    def facts(self) -> DeviceFacts: ...

    @property
    def counters(self) -> Counters: ...

    @property
    def memory(self) -> DeviceMemory: ...

    def place(self, layout: Layout) -> Layout:
        """The layout with every placement marked that rows cannot be written to, and why."""
        ...

    def prepare(
        self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...], given_up: Callable[[], bool] = never
    ) -> None:
        """Make the programs that a runtime of this model needs for these shapes, without touching the device.

        Without ``variants`` those that any request can be computed with. May take minutes, and is the one call that
        comes from a worker thread, while requests run. Raises DeviceError where a runtime could not be created, or
        soon after ``given_up`` says so; CAPACITY, where it could never run one of ``variants``.
        """
        ...

    def create_runtime(self, config: ModelConfig, layout: Layout, variants: tuple[Variant, ...] = ()) -> Runtime:
        """Allocate every parent, content undefined, and load the programs that ``prepare`` has made for the same.

        After an error nothing of it is left.
        """
        ...

    def close(self) -> None:
        """Give the device up. Idempotent."""
        ...
