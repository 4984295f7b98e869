"""The owner's side of remote prompts: asks the source, brings what arrives into the pages, follows what is resident."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.importing import PromptImport, PromptImporter
from rowlock.daemon.owner.prefilling import PrefillCounters, SourceView
from rowlock.daemon.owner.requests import Lease
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.target import Target
from rowlock.daemon.prefill.fitting import check_fit, geometry_of
from rowlock.daemon.prefill.importing import ImportedPrompt
from rowlock.daemon.prefill.keeper import SourceKeeper, SourceState, SourceStatus
from rowlock.daemon.prefill.life import Arrival
from rowlock.daemon.prefill.protocol.frames import Mode, Prefill, Release
from rowlock.daemon.prefill.settings import PrefillSettings
from rowlock.daemon.prefill.timeline import TIMELINES_MAX, Timeline
from rowlock.v1.errors import OwnerError, Reason

STEP_NS: Final = 10_000_000
"""For how long copies may begin before requests that decode get their next step: some tens of MiB on a host. What is
left waits for that whole step, which takes 20 to 80 ms where several long requests decode."""
STEP_ARRIVALS: Final = 1024
"""Frames taken in likewise."""
AHEAD: Final = 2
"""Prompts that may be computed ahead of their requests: one arrives while the next is computed."""


class SourcePrefiller:
    """See :class:`rowlock.daemon.owner.prefilling.Prefiller`. Owner thread only, but for ``view``.

    Args:
        settings: of the source, and how it is used.
        wake: wakes the owner thread; called on any.
        log: takes an event name and fields.
        now_ns: CLOCK_MONOTONIC.

    Attributes:
        view: now.
        timelines: of prompts that have ended, the newest last.

    """

    def __init__(
        self, settings: PrefillSettings, wake: Callable[[], None], log: Callable[..., None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:  # fmt: skip
        self.timelines: deque[Timeline] = deque(maxlen=TIMELINES_MAX)
        self._settings = settings
        self._wake = wake
        self._log = log
        self._now_ns = now_ns
        self._number = 0
        self._live: dict[int, ImportedPrompt] = {}
        self._keeper: SourceKeeper | None = None
        self._serves: tuple[str, str] | None = None
        self._next: tuple[tuple[str, str], SourceKeeper] | None = None
        self._retired: list[SourceKeeper] = []
        self._given_up: tuple[str, str] | None = None
        self._counters = PrefillCounters()
        self.view = self._look()

    @property
    def ahead(self) -> int:
        """See :class:`rowlock.daemon.owner.prefilling.Prefiller`."""
        return AHEAD if self._settings.prefetch else 0

    @property
    def waiting(self) -> bool:
        """See :class:`rowlock.daemon.owner.prefilling.Prefiller`."""
        arrived = self._keeper is not None and self._keeper.waiting
        return arrived or any(item.copying for item in self._live.values())

    def takes(self, prompt: tuple[int, ...]) -> bool:
        """See :class:`rowlock.daemon.owner.prefilling.Prefiller`."""
        if self._keeper is None:
            return False
        error = self._obstacle(self._keeper.status, len(prompt))
        if error is None:
            return True
        if not self._settings.fallback:
            raise error
        return False

    def note_local(self, prompt: tuple[int, ...]) -> None:
        """See :class:`rowlock.daemon.owner.prefilling.Prefiller`."""
        if self._keeper is not None:
            self._log("prefill.computed_here", tokens=len(prompt), reason=self._keeper.status.reason)
            self._count(fallbacks=1)

    def begin(
        self, prompt: tuple[int, ...], room: PromptImport, importer: PromptImporter, lease: Lease, resident: Resident
    ) -> ImportedPrompt:
        """See :class:`rowlock.daemon.owner.prefilling.Prefiller`."""
        assert self._keeper is not None
        geometry = geometry_of(resident.config, resident.model.layout)
        self._number += 1
        item = ImportedPrompt(self._number, geometry, prompt, room, importer, lease, self._ended, self._now_ns)
        self._live[item.number] = item
        self._keeper.send(self._order(item))
        self.view = self._look()
        return item

    def step(self) -> None:
        """See :class:`rowlock.daemon.owner.prefilling.Prefiller`."""
        for _ in range(STEP_ARRIVALS):
            arrival = self._keeper.take() if self._keeper is not None else None
            if arrival is None:
                break
            self._take(arrival)
        until_ns = self._now_ns() + STEP_NS
        for item in list(self._live.values()):
            item.copy(until_ns)
        self.view = self._look()

    # The life of the source.

    def follow(self, resident: Resident | None) -> None:
        """Have the source that computes what is resident: the one there is, the one prepared, or a new one."""
        serves = _computed(resident.model.identity) if resident is not None else None
        if serves == self._serves:
            if self._keeper is not None and resident is not None:  # the same weights may lie somewhere else now
                self._keeper.checkpoint = Path(resident.model.checkpoint)
            return
        assert not self._live, "prompts of another identity are being computed"
        self._retire(self._keeper)
        self._serves, self._keeper = serves, None
        if self._next is not None and self._next[0] == serves:
            self._keeper, self._next = self._next[1], None
        elif resident is not None and not self._let_go(resident):
            self._keeper = self._start(resident.model.checkpoint, resident)
        self.discard()
        self.view = self._look()

    def prepare(self, target: Target) -> Future[str] | None:
        """See :class:`rowlock.daemon.owner.prefilling.Prefiller`."""
        wanted = _computed(target.model.identity)
        if self._serves is None or wanted == self._serves:
            return None
        keeper = self._start(target.model.checkpoint, target)
        self._next = (wanted, keeper)
        return keeper.settled

    def settle(self, problem: str) -> None:
        """See :class:`rowlock.daemon.owner.prefilling.Prefiller`."""
        if not problem:
            return
        if self._settings.required:
            raise OwnerError(Reason.SOURCE_ABSENT, f"no source computes the target: it {problem}")
        self._log("prefill.source_let_go", reason=problem)
        assert self._next is not None
        self._given_up = self._next[0]
        self.discard()

    def discard(self) -> None:
        """The transition did not publish, or its source is in use now."""
        if self._next is not None:
            self._retire(self._next[1])
            self._next = None

    def close(self) -> None:
        """End every source, and wait for it."""
        for item in list(self._live.values()):
            item.end()
        self.discard()
        self._retire(self._keeper)
        self._keeper = None
        for keeper in self._retired:
            keeper.join()

    def _let_go(self, resident: Resident) -> bool:
        """Whether a model is served without a source: no checkpoint holds it, or its source was given up."""
        if self._settings.required:
            return False
        return bool(resident.overlay) or _computed(resident.model.identity) == self._given_up

    def _start(self, checkpoint: str, model: Resident | Target) -> SourceKeeper:
        identity, layout = model.model.identity, model.model.layout
        check = partial(check_fit, identity=identity, config=model.config, layout=layout, mode=self._settings.mode)
        keeper = SourceKeeper(self._settings.source, Path(checkpoint), check, self._wake, self._log)
        keeper.start()
        return keeper

    def _retire(self, keeper: SourceKeeper | None) -> None:
        if keeper is not None:
            keeper.close()
            self._retired = [item for item in self._retired if item.status.state is not SourceState.CLOSED]
            self._retired.append(keeper)

    # Prompts.

    def _obstacle(self, status: SourceStatus, tokens: int) -> OwnerError | None:
        if status.state in {SourceState.ABSENT, SourceState.CLOSED}:
            return OwnerError(Reason.SOURCE_ABSENT, f"prompts are computed by a source, and it {status.reason}")
        widest = status.facts.widths[-1] if status.facts else self._settings.source.widths[-1]
        if tokens > widest:
            return OwnerError(
                Reason.CONTEXT_EXCEEDED, f"{tokens} prompt tokens; the widest program of the source is for {widest}"
            )
        return None

    def _order(self, item: ImportedPrompt) -> Prefill:
        settings, identity = self._settings, item.lease.identity
        short = len(item.prompt) < settings.stream_from
        return Prefill(
            request=item.number,
            generation=item.lease.generation,
            program=bytes.fromhex(identity.program),
            weights=bytes.fromhex(identity.weights),
            mode=Mode.WHOLE if short else settings.mode,
            layers_per_span=settings.layers_per_span,
            chunk=settings.chunk,
            firsts=item.layout.firsts,
            tokens=item.prompt,
        )

    def _take(self, arrival: Arrival) -> None:
        if arrival.frame is None:
            error = OwnerError(Reason.SOURCE_FAILED, f"the source of the prompt {arrival.reason}")
            for item in self._live.values():
                if not item.ended_on_wire:  # what is here in full needs no source any more
                    item.fail(error)
            return
        number = arrival.frame.request
        asked = self._live.get(number)
        if asked is not None and not asked.ended_on_wire:
            asked.take(arrival)
            return
        arrival.let_go()
        if 0 < number <= self._number:
            self._count(late=1)
        elif self._keeper is not None:
            name = type(arrival.frame).__name__.lower()
            self._keeper.kill(f"sent {name}.request {number}, which it was never asked for")

    def _ended(self, item: ImportedPrompt) -> None:
        del self._live[item.number]
        if self._keeper is not None:
            self._keeper.send(Release(item.number, item.lease.generation))
        admitted = item.timeline.admitted > 0
        copied = sum(nbytes for _, _, nbytes in item.timeline.copies)
        self._count(
            remote=int(admitted),
            failed=int(item.error is not None),
            spans=item.spans,
            bytes=copied,
            quarantined=int(item.quarantined),
        )
        self.timelines.append(item.timeline)
        self.view = self._look()
        if admitted:
            if self._keeper is not None:
                self._keeper.note_good()
            self._log(
                "prefill.imported", request=item.number, spans=item.spans, bytes=copied, **item.timeline.figures()
            )

    def _count(self, **more: int) -> None:
        now = {name: getattr(self._counters, name) + value for name, value in more.items()}
        self._counters = replace(self._counters, **now)

    def _look(self) -> SourceView:
        mode = self._settings.mode.name.lower()
        if self._keeper is None:
            return SourceView("NONE", "", 0, 0, "", mode, 0, self._counters)
        status = self._keeper.status
        name = status.facts.name if status.facts else ""
        return SourceView(
            status.state.value, name, status.pid, status.restarts, status.reason, mode, len(self._live), self._counters
        )


def _computed(identity: Identity) -> tuple[str, str]:
    """What K/V depends on: not the tokenizer."""
    return identity.program, identity.weights
