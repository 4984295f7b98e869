"""Requests whose prompts are being computed elsewhere, from their admission until they run."""

from __future__ import annotations

from dataclasses import dataclass

from rowlock.bindings.importing import NoRoomError
from rowlock.daemon.owner.prefilling import Prefiller, RemotePrompt
from rowlock.daemon.owner.requests import GenerationRequest, Lease
from rowlock.daemon.owner.resident import Resident


@dataclass(frozen=True, eq=False)
class Importing:
    """One of them. It holds a lease and pages, and nothing of it can be seen.

    Attributes:
        tokens: of its prompt, and the new ones that it may have.
        since: when it got its lease.

    """

    request: GenerationRequest
    lease: Lease
    remote: RemotePrompt
    tokens: tuple[int, int]
    since: float


class Imports:
    """All of them.

    Args:
        prefiller: has prompts computed.

    Attributes:
        items: the oldest first.

    """

    def __init__(self, prefiller: Prefiller) -> None:
        self.prefiller = prefiller
        self.items: list[Importing] = []

    @property
    def ready(self) -> bool:
        """Whether there is something to do: to take in, to let in, or to end."""
        return self.prefiller.waiting or any(
            item.remote.complete or item.remote.error or item.request.cancelled.is_set() for item in self.items
        )

    @property
    def complete(self) -> Importing | None:
        """The oldest one that can run."""
        return next((item for item in self.items if item.remote.complete), None)

    def begin(
        self, request: GenerationRequest, lease: Lease, prompt: tuple[int, ...], new: int, resident: Resident,
        since: float,
    ) -> bool:  # fmt: skip
        """Have a prompt computed that ``new`` tokens will follow; False when there is no room for it now.

        Raises DeviceError(CAPACITY): there never will be.
        """
        importer = resident.runtime.importer
        assert importer is not None, "a runtime that cannot import has no source"
        try:
            room = importer.open(prompt, request.sampling, len(prompt) + new)
        except NoRoomError:
            return False
        remote = self.prefiller.begin(prompt, room, importer, lease, resident)
        self.items.append(Importing(request, lease, remote, (len(prompt), new), since))
        return True
