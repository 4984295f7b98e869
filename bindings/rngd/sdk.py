"""FuriosaAI's packages: the one file that imports them, each inside the function that needs it.

None of these calls ends a process without a card. Those that do (streams of torch's own
API, ``torch.compile`` once the backend is registered) are not made. What a caller learns
is a value or a :class:`DeviceError`; see docs/vendor-private-api.md for every name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Final, Protocol

import torch

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.vendor_errors import MESSAGE_MAX, as_device_error

FUSION: Final = 8
"""Processing elements that make one device: all eight of a card, so that ``furiosa:N`` is card N."""
PACKAGES: Final = ("furiosa-torch", "furiosa-kernels", "furiosa-smi", "torch")

PANIC: Final = "PanicException"
"""Of the vendor's native code: the class has no importable name."""

Program = Callable[..., Sequence[torch.Tensor]]
"""A loaded program: tensors in, tensors out."""


class Dfg(Protocol):
    """A graph of the vendor's importer."""

    VENDOR: ClassVar[str] = "furiosa.torch.ir.Dfg"

    def serialize(self) -> bytes: ...


class GraphModule(Protocol):
    """A graph with what it was made from."""

    VENDOR: ClassVar[str] = "furiosa.torch.DfgModule"

    @property
    def dfg(self) -> Dfg: ...


class Binary(Protocol):
    """What the vendor's compiler makes."""

    VENDOR: ClassVar[str] = "furiosa.torch.ir.Runnable"

    def serialize(self) -> bytes: ...


class Fused(Protocol):
    """How many processing elements make one device."""

    VENDOR: ClassVar[str] = "furiosa.torch.Fusion"

    @property
    def num_fusion(self) -> int: ...


class DramShape(Protocol):
    """Where the elements of a tensor lie: within each chip, and over the chips."""

    VENDOR: ClassVar[str] = "furiosa.torch.ir.FlatDramShape"

    @property
    def intra_chip_sizes(self) -> list[int]: ...

    @property
    def intra_chip_strides(self) -> list[int]: ...


class Stream(Protocol):
    """Work on a card, in order."""

    VENDOR: ClassVar[str] = "furiosa.torch.Stream"

    def synchronize(self) -> None: ...


class Card(Protocol):
    """A card as the management library sees it."""

    VENDOR: ClassVar[str] = "furiosa_smi.Device"

    def device_name(self) -> str: ...

    def firmware_version(self) -> object: ...


def versions() -> dict[str, str]:
    """Distribution -> version, and the revision of the compiler."""
    import furiosa.torch as ft  # noqa: PLC0415 - see the module's text

    found = {package: version(package) for package in PACKAGES}
    return {**found, "furiosa-compiler": str(ft.compiler.version())}


def claim_fusion() -> None:
    """Make a whole card one device. Has to come before any question that freezes another number.

    Raises:
        DeviceError: UNSUPPORTED, when the process has already settled on another.

    """
    import furiosa.torch as ft  # noqa: PLC0415

    try:
        ft.set_fusion(FUSION)
    except RuntimeError:
        fused: Fused = ft.get_fusion()
        if fused.num_fusion != FUSION:
            raise DeviceError(
                DeviceFault.UNSUPPORTED,
                f"this process has {fused.num_fusion} processing elements as one device already, not {FUSION}",
            ) from None


def is_present(index: int) -> bool:
    """Whether ``furiosa:index`` is there: the only question about it that is answered honestly without a card."""
    import furiosa.torch as ft  # noqa: PLC0415

    return bool(ft.is_available(f"furiosa:{index}"))


def register() -> None:
    """Make ``furiosa:N`` a device of torch. Only where a card is: some calls of torch end the process otherwise."""
    from furiosa.torch._register import _register  # noqa: PLC0415

    _register()


def synchronize(index: int) -> None:
    """Wait for everything that this thread has asked of a card."""
    import furiosa.torch as ft  # noqa: PLC0415

    with vendor_errors("the fence"):
        stream: Stream = ft.current_stream(f"furiosa:{index}")
        stream.synchronize()


def build_graph(module: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> bytes:
    """A module imported as the vendor's graph, serialised. Every tensor of it is an input of the call."""
    import furiosa.torch as ft  # noqa: PLC0415

    with vendor_errors("the import of the graph"):
        built: GraphModule = ft.DfgModule.from_module(module, example)
        return bytes(built.dfg.serialize())


def load_graph(artifact: bytes) -> Program:
    """A graph for the vendor's evaluator on the host."""
    import furiosa.torch as ft  # noqa: PLC0415

    with vendor_errors("the loading of the graph"):
        graph: Program = ft.DfgModule(ft.ir.Dfg.deserialize(artifact))
    return graph


def build_binary(module: torch.nn.Module, example: tuple[torch.Tensor, ...], cache: Path) -> bytes:
    """A module compiled for the card, serialised. Needs the aarch64 cross compiler unless ``cache`` has it."""
    import furiosa.torch as ft  # noqa: PLC0415

    with vendor_errors("the compilation"), ft.config.cache_context(str(cache)):
        exported = torch.export.export(module, example, strict=False)
        context = ft.export.PassContext()
        for fx_pass in ft.export.PASSES:
            exported = fx_pass(exported, context)
        binary: Binary = ft.compiler.compile(exported)
        return bytes(binary.serialize())


def load_binary(artifact: bytes, index: int) -> Program:
    """A compiled program on a card."""
    import furiosa.torch as ft  # noqa: PLC0415

    with vendor_errors("the loading of the program"):
        program: Program = ft.Runnable(ft.ir.Runnable.deserialize(artifact)).to(f"furiosa:{index}")
    return program


def sharded_shape(sizes: Sequence[int], shard_axes: Sequence[tuple[int, int]], dtype: torch.dtype) -> DramShape:
    """Where a tensor lies that is split over chips: ``(axis, parts)``. Raises ValueError where it can't be."""
    import furiosa.torch as ft  # noqa: PLC0415

    shape: DramShape
    if shard_axes:
        shape = ft.ir.FlatDramShape.from_host_sizes(list(sizes), list(shard_axes), dtype)
    else:
        shape = ft.ir.FlatDramShape.new_as_broadcast(list(sizes), dtype)
    return shape


def driver_version() -> str:
    """Of the kernel driver; what is missing, where there is none.

    Raises:
        DeviceError: LOST, with the library's words.

    """
    import furiosa_smi  # noqa: PLC0415

    try:
        return str(furiosa_smi.driver_info())
    except furiosa_smi.SmiError as error:
        raise DeviceError(DeviceFault.LOST, str(error)) from None


def cards() -> list[str]:
    """The cards that the management library sees, with their firmware."""
    import furiosa_smi  # noqa: PLC0415

    found: list[Card] = furiosa_smi.list_devices()
    return [f"{card.device_name()} (firmware {card.firmware_version()})" for card in found]


@contextmanager
def vendor_errors(what: str) -> Iterator[None]:
    """The vendor's exceptions as ours: a panic of its native code too, which is no Exception in Python.

    Args:
        what: was being done, for the message.

    """
    import furiosa.torch as ft  # noqa: PLC0415

    with as_device_error(DeviceFault.LOST, what):
        try:
            yield
        except (ft.error.CompileError, ft.error.UnsupportedOpError) as error:
            raise _device_error(DeviceFault.UNSUPPORTED, what, error) from error.with_traceback(None)
        except ValueError as error:
            raise _device_error(DeviceFault.LOST, what, error) from error.with_traceback(None)
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            raise _device_error(DeviceFault.LOST, what, error) from error.with_traceback(None)


def _device_error(fault: DeviceFault, what: str, error: BaseException) -> DeviceError:
    return DeviceError(fault, f"{what}: {str(error).strip()[:MESSAGE_MAX]}")
