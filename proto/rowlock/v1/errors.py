"""Every reason for which an owner refuses or fails, with the codes that go with it.

One table for both sides: the daemon sends the status code and the reason (as
``google.rpc.ErrorInfo``, domain :data:`DOMAIN`) or the HTTP status, clients and the command
line look up the exit code and the hint.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import grpc

DOMAIN: Final = "rowlock.v1"


class Reason(StrEnum):
    """Why a call was refused, or why a transition did not publish."""

    ARGUMENT_INVALID = "ARGUMENT_INVALID"
    CACHE_EXCEEDED = "CACHE_EXCEEDED"
    CANCELLED = "CANCELLED"
    CONTEXT_EXCEEDED = "CONTEXT_EXCEEDED"
    DEADLINE_PASSED = "DEADLINE_PASSED"
    DEVICE_FAILED = "DEVICE_FAILED"
    DRAINED = "DRAINED"
    DRIFT = "DRIFT"
    EMPTY = "EMPTY"
    ETAG_STALE = "ETAG_STALE"
    GENERATION_STALE = "GENERATION_STALE"
    IDENTITY_DIFFERS = "IDENTITY_DIFFERS"
    INTERNAL = "INTERNAL"
    INTERRUPTED = "INTERRUPTED"
    IRREVERSIBLE = "IRREVERSIBLE"
    JOURNAL_FAILED = "JOURNAL_FAILED"
    MEMORY_SHORT = "MEMORY_SHORT"
    NONFINITE = "NONFINITE"
    NOT_CANCELLABLE = "NOT_CANCELLABLE"
    NOT_FOUND = "NOT_FOUND"
    NOT_QUARANTINED = "NOT_QUARANTINED"
    PLAN_CHANGED = "PLAN_CHANGED"
    PLAN_REFUSED = "PLAN_REFUSED"
    QUARANTINED = "QUARANTINED"
    QUEUE_FULL = "QUEUE_FULL"
    READER_STALLED = "READER_STALLED"
    REQUEST_ID_REUSED = "REQUEST_ID_REUSED"
    ROLLBACK_UNAVAILABLE = "ROLLBACK_UNAVAILABLE"
    SOURCE_ABSENT = "SOURCE_ABSENT"
    SOURCE_FAILED = "SOURCE_FAILED"
    STAGING_FAILED = "STAGING_FAILED"
    STOPPING = "STOPPING"
    TARGET_CHANGED = "TARGET_CHANGED"
    TARGET_INVALID = "TARGET_INVALID"
    TARGET_NOT_FOUND = "TARGET_NOT_FOUND"
    TRANSITION_OPEN = "TRANSITION_OPEN"
    VERIFY_MISMATCH = "VERIFY_MISMATCH"


@dataclass(frozen=True)
class ReasonInfo:
    """What goes with a reason.

    Attributes:
        status: the gRPC status code of a refusal.
        exit_code: of the command line.
        hint: what to do, in one sentence.
        http: the HTTP status, where it does not follow from the gRPC one.

    """

    status: grpc.StatusCode
    exit_code: int
    hint: str
    http: int = 0

    @property
    def http_status(self) -> int:
        return self.http or _HTTP[self.status]


_CODE = grpc.StatusCode
_HTTP: Final = {
    _CODE.ABORTED: 409,
    _CODE.CANCELLED: 499,
    _CODE.DATA_LOSS: 503,
    _CODE.DEADLINE_EXCEEDED: 504,
    _CODE.FAILED_PRECONDITION: 409,
    _CODE.INTERNAL: 500,
    _CODE.INVALID_ARGUMENT: 400,
    _CODE.NOT_FOUND: 404,
    _CODE.RESOURCE_EXHAUSTED: 503,
    _CODE.UNAVAILABLE: 503,
}
"""HTTP status by gRPC status; 499 is what proxies log for a client that went away."""
_REFUSED, _NOTHING_WRITTEN = 3, 9

REASONS: Final[dict[Reason, ReasonInfo]] = {
    Reason.ARGUMENT_INVALID: ReasonInfo(_CODE.INVALID_ARGUMENT, 2, "correct the named field"),
    Reason.CACHE_EXCEEDED: ReasonInfo(
        _CODE.INVALID_ARGUMENT, _REFUSED, "ask for less, or give the owner more `serving.cache_bytes`"
    ),
    Reason.CANCELLED: ReasonInfo(_CODE.CANCELLED, _NOTHING_WRITTEN, "nothing was written; start it again when ready"),
    Reason.CONTEXT_EXCEEDED: ReasonInfo(
        _CODE.INVALID_ARGUMENT, _REFUSED, "shorten the prompt, or ask for fewer tokens"
    ),
    Reason.DEADLINE_PASSED: ReasonInfo(
        _CODE.DEADLINE_EXCEEDED, _REFUSED, "ask for fewer tokens, or raise `http.deadline_s`"
    ),
    Reason.DEVICE_FAILED: ReasonInfo(
        _CODE.INTERNAL, _NOTHING_WRITTEN, "look at the device's own log, then run `rowlock verify`"
    ),
    Reason.DRAINED: ReasonInfo(_CODE.ABORTED, _REFUSED, "ask again: the new identity answers", http=503),
    Reason.DRIFT: ReasonInfo(
        _CODE.DATA_LOSS,
        7,
        "resident bytes are not those of the identity: reload with `rowlock transition --require b1`",
    ),
    Reason.EMPTY: ReasonInfo(
        _CODE.FAILED_PRECONDITION, _REFUSED, "load a checkpoint: `rowlock transition --target DIR`", http=503
    ),
    Reason.ETAG_STALE: ReasonInfo(_CODE.ABORTED, _REFUSED, "read the owner's state again, then decide anew"),
    Reason.GENERATION_STALE: ReasonInfo(_CODE.ABORTED, _REFUSED, "read the owner's state again, then decide anew"),
    Reason.IDENTITY_DIFFERS: ReasonInfo(
        _CODE.ABORTED, _REFUSED, "the owner moved to another identity: look at it, then pin that one or none"
    ),
    Reason.INTERNAL: ReasonInfo(
        _CODE.INTERNAL, _NOTHING_WRITTEN, "a bug in rowlock: please report it with the daemon's log"
    ),
    Reason.INTERRUPTED: ReasonInfo(_CODE.UNAVAILABLE, _NOTHING_WRITTEN, "the daemon stopped meanwhile; start it again"),
    Reason.IRREVERSIBLE: ReasonInfo(
        _CODE.FAILED_PRECONDITION,
        _REFUSED,
        "the old identity could not be rebuilt: restore its checkpoint, or allow it with --allow-irreversible",
    ),
    Reason.JOURNAL_FAILED: ReasonInfo(
        _CODE.RESOURCE_EXHAUSTED, _NOTHING_WRITTEN, "check space and permissions of the state directory"
    ),
    Reason.MEMORY_SHORT: ReasonInfo(
        _CODE.RESOURCE_EXHAUSTED,
        _NOTHING_WRITTEN,
        "free host memory: the plan says how much a transition needs",
    ),
    Reason.NONFINITE: ReasonInfo(
        _CODE.INVALID_ARGUMENT,
        _NOTHING_WRITTEN,
        "look at how the target was made; allow it with --allow-nonfinite if it is meant",
    ),
    Reason.NOT_CANCELLABLE: ReasonInfo(_CODE.FAILED_PRECONDITION, _REFUSED, "`rowlock history ID` shows how it ended"),
    Reason.NOT_FOUND: ReasonInfo(_CODE.NOT_FOUND, _REFUSED, "list what there is with `rowlock history`"),
    Reason.NOT_QUARANTINED: ReasonInfo(_CODE.FAILED_PRECONDITION, _REFUSED, "there is nothing to release"),
    Reason.PLAN_CHANGED: ReasonInfo(_CODE.ABORTED, _REFUSED, "plan again, and look at what changed"),
    Reason.PLAN_REFUSED: ReasonInfo(_CODE.FAILED_PRECONDITION, _REFUSED, "see the blockers with `rowlock plan`"),
    Reason.QUARANTINED: ReasonInfo(
        _CODE.FAILED_PRECONDITION,
        6,
        "the device's content cannot be proved: check the device, then `rowlock release`",
        http=503,
    ),
    Reason.QUEUE_FULL: ReasonInfo(
        _CODE.RESOURCE_EXHAUSTED, _REFUSED, "send fewer requests at once, and retry later", http=429
    ),
    Reason.READER_STALLED: ReasonInfo(
        _CODE.CANCELLED, _REFUSED, "read answers as they come; `api.stall_s` says how long they wait"
    ),
    Reason.REQUEST_ID_REUSED: ReasonInfo(
        _CODE.INVALID_ARGUMENT, _REFUSED, "use a new request id for each different request"
    ),
    Reason.ROLLBACK_UNAVAILABLE: ReasonInfo(
        _CODE.FAILED_PRECONDITION, _REFUSED, "see `rowlock history`; transition to a checkpoint instead"
    ),
    Reason.SOURCE_ABSENT: ReasonInfo(
        _CODE.UNAVAILABLE,
        _REFUSED,
        "retry: the source is started again; `rowlock status` and the log say what it lacks",
    ),
    Reason.SOURCE_FAILED: ReasonInfo(
        _CODE.UNAVAILABLE, _REFUSED, "retry; if it goes on, look at what the source wrote to the daemon's log"
    ),
    Reason.STAGING_FAILED: ReasonInfo(
        _CODE.UNAVAILABLE,
        _NOTHING_WRITTEN,
        "start it again; a process that was killed often means too little memory: see the kernel's log",
    ),
    Reason.STOPPING: ReasonInfo(_CODE.UNAVAILABLE, 8, "the daemon is stopping; retry when it is up again"),
    Reason.TARGET_CHANGED: ReasonInfo(
        _CODE.FAILED_PRECONDITION,
        _REFUSED,
        "the files changed after they were digested: write checkpoints once, then rename",
    ),
    Reason.TARGET_INVALID: ReasonInfo(_CODE.INVALID_ARGUMENT, _REFUSED, "mend or rewrite the checkpoint"),
    Reason.TARGET_NOT_FOUND: ReasonInfo(_CODE.NOT_FOUND, _REFUSED, "check the path on the owner's machine"),
    Reason.TRANSITION_OPEN: ReasonInfo(_CODE.ABORTED, _REFUSED, "wait for the open transition: `rowlock status`"),
    Reason.VERIFY_MISMATCH: ReasonInfo(
        _CODE.DATA_LOSS,
        7,
        "the device returned other bytes than were written: check the device before trying again",
    ),
}


class OwnerError(Exception):
    """A refusal or failure with its reason.

    Attributes:
        reason: a row of :data:`REASONS`.
        hint: what to do; the table's unless the raiser knows better.

    """

    def __init__(self, reason: Reason, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.hint = hint or REASONS[reason].hint

    def __reduce__(self) -> tuple[type[OwnerError], tuple[Reason, str, str]]:
        return type(self), (self.reason, str(self), self.hint)
