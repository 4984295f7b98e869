"""What was found when a machine was looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rowlock.bindings.device import Binding, DeviceError


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Attributes:
        ok: False keeps an owner from starting or from working well.

    """

    name: str
    ok: bool
    detail: str


def open_and_look(open_binding: Callable[[], Binding]) -> Iterator[Finding]:
    """Whether a binding opens and its device answers, and what the binding says of itself."""
    try:
        binding = open_binding()
        binding.memory.probe()
    except DeviceError as error:
        yield Finding("device", False, str(error))
        return
    facts = binding.facts
    yield Finding(
        "device",
        True,
        f"{facts.device}, here {facts.logical}: {facts.execution}, readback proves {facts.readback}"
        + "".join(f"; {option}" for option in facts.test_options),
    )
