"""How a transition is carried out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rowlock.bindings.plan import TargetCheck, Verify


class Drain(StrEnum):
    """How requests that run give way."""

    WAIT = "WAIT"
    DEADLINE = "DEADLINE"
    CANCEL = "CANCEL"


@dataclass(frozen=True)
class Options:
    """The daemon's configuration, with what a caller asks for in its place.

    Attributes:
        verify: how much is read back before the publish.
        target_check: how much of the target is digested before the drain.
        drain: how running requests give way.
        drain_deadline_s: with DEADLINE: after so many seconds the transition is cancelled.
        allow_irreversible: go on although the old identity could not be rebuilt.
        allow_nonfinite: accept values that are not finite where the resident ones are.
        reload_old: after a failed B1, load the old identity again; else stay EMPTY.

    """

    verify: Verify = Verify.PARENTS
    target_check: TargetCheck = TargetCheck.WHOLE
    drain: Drain = Drain.WAIT
    drain_deadline_s: float = 0.0
    allow_irreversible: bool = False
    allow_nonfinite: bool = False
    reload_old: bool = True
