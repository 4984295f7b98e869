"""Where the parents of a model lie and how its programs run: on a card, or by the vendor's evaluator on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, Self

import torch

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.rngd import sdk


class Engine(Protocol):
    """One way to run.

    Attributes:
        logical: what the vendor's library calls it here.
        torch_device: where tensors are made.
        execution: see DeviceFacts.
        readback: see DeviceFacts.

    """

    @property
    def logical(self) -> str: ...

    @property
    def torch_device(self) -> str: ...

    @property
    def execution(self) -> str: ...

    @property
    def readback(self) -> str: ...

    def fence(self) -> None:
        """Wait for everything that was started."""
        ...

    def probe(self) -> None:
        """Raise DeviceError if it does not answer."""
        ...

    def build(self, module: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> bytes:
        """An artifact that computes what the module does, for tensors of these shapes. No byte of them is in it."""
        ...

    def load(self, artifact: bytes) -> sdk.Program:
        """A program that can be called with tensors of this engine."""
        ...


class ReferenceEngine:
    """No card: host memory of our own, and the vendor's graph run by the vendor's own evaluator."""

    logical = "reference"
    torch_device = "cpu"
    execution = "reference"
    readback = "storage"

    def fence(self) -> None:
        """Every copy has finished when it returns."""

    def probe(self) -> None:
        """Host memory always answers."""

    def build(self, module: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> bytes:
        return sdk.build_graph(module, example)

    def load(self, artifact: bytes) -> sdk.Program:
        return sdk.load_graph(artifact)


class CardEngine:
    """A card. Whether a readback could be answered from anywhere but its memory has not been seen on one.

    Args:
        index: of the card.
        compiler_cache: directory of the vendor's compiler's own cache.

    """

    execution = "native"
    readback = "unproven"

    def __init__(self, index: int, compiler_cache: Path) -> None:
        self._index = index
        self._compiler_cache = compiler_cache
        self.logical = self.torch_device = f"furiosa:{index}"

    @classmethod
    def open(cls, index: int, compiler_cache: Path) -> Self:
        """Make torch know the card.

        Raises:
            DeviceError: LOST, when it is not there.

        """
        engine = cls(index, compiler_cache)
        engine.probe()
        sdk.register()
        return engine

    def fence(self) -> None:
        sdk.synchronize(self._index)

    def probe(self) -> None:
        if not sdk.is_present(self._index):
            raise DeviceError(DeviceFault.LOST, f"{self.logical} is not there")

    def build(self, module: torch.nn.Module, example: tuple[torch.Tensor, ...]) -> bytes:
        return sdk.build_binary(module, example, self._compiler_cache)

    def load(self, artifact: bytes) -> sdk.Program:
        return sdk.load_binary(artifact, self._index)
