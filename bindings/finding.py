"""What was found when a machine was looked at."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rowlock.bindings.device import Binding, DeviceError

TOOL_S: Final = 30.0
"""A management tool asks the driver, and a driver can hang."""
WORDS_MAX: Final = 300


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


def ask_tool(command: Sequence[str], understand: Callable[[str], tuple[bool, str]]) -> Finding:
    """What a vendor's management tool says. One that is absent, fails or is not understood is no reason to refuse.

    Args:
        command: the tool and its arguments.
        understand: whether its output leaves room for the device, and a detail; ValueError, TypeError or AttributeError
            where it is of another form.

    """
    name = command[0]
    if shutil.which(name) is None:
        return Finding(name, True, "not installed; only for looking")
    try:
        done = subprocess.run(command, capture_output=True, timeout=TOOL_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(name, True, f"gave no answer: {error}")
    out, err = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
    if done.returncode != 0:
        return Finding(name, True, f"ended with {done.returncode}: {_shortened(err or out)}")
    try:
        return Finding(name, *understand(out))
    except (ValueError, TypeError, AttributeError):
        return Finding(name, True, f"is not understood: {_shortened(out)}")


def _shortened(text: str) -> str:
    return " ".join(text.split())[:WORDS_MAX]
