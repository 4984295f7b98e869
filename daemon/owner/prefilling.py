"""What the owner needs of somebody who computes prompts elsewhere. Owner thread only, but for views."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from rowlock.bindings.device import Sequence, Step
from rowlock.bindings.importing import PromptImport, PromptImporter
from rowlock.daemon.owner.requests import Lease
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.target import Target
from rowlock.v1.errors import OwnerError


@dataclass(frozen=True)
class PrefillCounters:
    """Since the process started.

    Attributes:
        remote: prompts that were computed by a source and admitted.
        failed: prompts that a source was asked for and did not bring.
        fallbacks: prompts computed here because no source could.
        spans: imported.
        bytes: of K/V imported.
        late: frames that came after their request had ended.
        quarantined: prompts whose pages were given up, as a copy could not be proved to have ended.

    """

    remote: int = 0
    failed: int = 0
    fallbacks: int = 0
    spans: int = 0
    bytes: int = 0
    late: int = 0
    quarantined: int = 0


@dataclass(frozen=True)
class SourceView:
    """The source at one moment.

    Attributes:
        state: STARTING, READY, ABSENT, or NONE: prompts are computed here.
        name: as it announced itself; empty before.
        pid: of its process; 0 while there is none.
        restarts: how often it was started again.
        reason: why it is absent, or empty.
        mode: whole or stream.
        live: prompts that are being computed or imported.

    """

    state: str
    name: str
    pid: int
    restarts: int
    reason: str
    mode: str
    live: int
    counters: PrefillCounters = field(default_factory=PrefillCounters)


class RemotePrompt(Protocol):
    """One prompt that is being computed elsewhere.

    Attributes:
        error: why it will not come; then it only has to be ended.
        complete: all of its K/V is here, and its logits.

    """

    @property
    def error(self) -> OwnerError | None: ...

    @property
    def complete(self) -> bool: ...

    def admit(self, resident: Resident) -> tuple[Sequence, Step]:
        """Make it a sequence: checked once more, here, that it is of what is resident.

        Raises OwnerError or DeviceError; then it has to be ended.
        """
        ...

    def end(self, *, abandon: bool = False) -> None:
        """It is not wanted any more. Idempotent; nothing after ``admit``.

        Args:
            abandon: do not ask the device whether its copies have ended; its pages are given up.

        """
        ...


class Prefiller(Protocol):
    """Computes prompts elsewhere, and brings their K/V here."""

    @property
    def view(self) -> SourceView: ...

    @property
    def ahead(self) -> int:
        """Requests whose prompts may be computed before they have a place among those that run."""
        ...

    @property
    def waiting(self) -> bool:
        """Whether ``step`` would do anything."""
        ...

    def takes(self, prompt: tuple[int, ...]) -> bool:
        """Whether a prompt is computed elsewhere.

        Raises OwnerError: it should be, and cannot.
        """
        ...

    def note_local(self, prompt: tuple[int, ...]) -> None:
        """A prompt is computed here after all."""
        ...

    def begin(
        self, prompt: tuple[int, ...], room: PromptImport, importer: PromptImporter, lease: Lease, resident: Resident
    ) -> RemotePrompt:
        """Have a prompt computed."""
        ...

    def step(self) -> None:
        """Take in what has arrived: a bounded slice of it."""
        ...

    def follow(self, resident: Resident | None) -> None:
        """Compute under what is resident from now on. No prompt of another identity may be on its way."""
        ...

    def prepare(self, target: Target) -> Future[str] | None:
        """Get ready for a target; None: nothing is needed. The result says what is wrong, or nothing."""
        ...

    def settle(self, problem: str) -> None:
        """Go on with what ``prepare`` came to. Raises OwnerError where the transition must not."""
        ...

    def discard(self) -> None:
        """The transition has ended: what was prepared and is not followed ends too."""
        ...

    def close(self) -> None:
        """End everything, and wait for it."""
        ...
