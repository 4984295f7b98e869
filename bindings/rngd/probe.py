"""What there is of an RNGD, found without a call that could end the process for lack of one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rowlock.bindings.address import DeviceAddress
from rowlock.bindings.device import DeviceError
from rowlock.bindings.finding import Finding
from rowlock.bindings.rngd import sdk


def probe(address: DeviceAddress, without_hardware: bool) -> Iterator[Finding]:
    """What there is of a card; or, without hardware, whether the vendor's evaluator works.

    Args:
        address: of the card.
        without_hardware: reference execution is asked for.

    """
    try:
        sdk.claim_fusion()
        found = sdk.versions()
    except (ImportError, OSError, DeviceError) as error:
        yield Finding("furiosa-torch", False, f"cannot be loaded: {error}")
        return
    yield Finding("furiosa-torch", True, ", ".join(f"{name} {number}" for name, number in found.items()))
    yield from _evaluator() if without_hardware else _card(address)


def _card(address: DeviceAddress) -> Iterator[Finding]:
    """Driver, then card: each needs the one before."""
    try:
        yield Finding("driver", True, sdk.driver_version())
    except DeviceError as error:
        yield Finding("driver", False, str(error))
    cards = sdk.cards()
    yield Finding("cards", bool(cards), ", ".join(cards) or "lists no card")
    there = sdk.is_present(address.logical)
    hint = "" if there else "; `--without-hardware` runs the vendor's evaluator on the host instead"
    yield Finding("device", there, f"furiosa:{address.logical} is {'there' if there else 'not there'}{hint}")


def _evaluator() -> Iterator[Finding]:
    """Whether it computes what torch does. Asks for no card."""
    left, right = torch.eye(8), torch.arange(64.0).view(8, 8)
    try:
        program = sdk.load_graph(sdk.build_graph(_Product(), (left, torch.zeros(8, 8))))
        (found,) = program(left, right)
    except DeviceError as error:
        yield Finding("evaluator", False, str(error))
        return
    same = torch.equal(found, right)
    yield Finding("evaluator", same, "computes what torch does" if same else "computes something else than torch")


class _Product(torch.nn.Module):
    """The least that tells an evaluator from something else."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.matmul(left, right)
