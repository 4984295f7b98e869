"""From the messages of ``rowlock.v1`` to the core's values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from blake3 import blake3
from google.protobuf.message import Message

from rowlock.bindings.device import Variant
from rowlock.bindings.plan import Require, TargetCheck, Verify
from rowlock.daemon.owner.options import Drain, Options
from rowlock.daemon.owner.scheduler import ACTIVE_MAX
from rowlock.v1 import owner_pb2
from rowlock.v1.errors import OwnerError, Reason

E = TypeVar("E")

_REQUIRE: Final = {
    owner_pb2.REQUIRE_AUTO: Require.AUTO,
    owner_pb2.REQUIRE_B2: Require.B2,
    owner_pb2.REQUIRE_B1: Require.B1,
}
_VERIFY: Final = {
    owner_pb2.VERIFY_MODE_PARENTS: Verify.PARENTS,
    owner_pb2.VERIFY_MODE_GROUPS: Verify.GROUPS,
    owner_pb2.VERIFY_MODE_ALL: Verify.ALL,
}
_TARGET_CHECK: Final = {
    owner_pb2.TARGET_CHECK_WHOLE: TargetCheck.WHOLE,
    owner_pb2.TARGET_CHECK_STAGED: TargetCheck.STAGED,
}
_DRAIN: Final = {
    owner_pb2.DRAIN_MODE_WAIT: Drain.WAIT,
    owner_pb2.DRAIN_MODE_DEADLINE: Drain.DEADLINE,
    owner_pb2.DRAIN_MODE_CANCEL: Drain.CANCEL,
}
REQUEST_ID_MAX: Final = 200


def target_path(value: str) -> Path:
    if not value.startswith("/") or "\0" in value:
        raise OwnerError(Reason.ARGUMENT_INVALID, f"target: {value[:200]!r} is not an absolute path")
    return Path(value)


def require_of(value: int) -> Require:
    return _choice("require", value, _REQUIRE, Require.AUTO)


def options_of(message: owner_pb2.TransitionOptions, configured: Options) -> Options:
    """The daemon's options, with what the caller set in their place."""
    drain = _choice("options.drain", message.drain, _DRAIN, configured.drain)
    deadline = message.drain_deadline_s or configured.drain_deadline_s
    if not (math.isfinite(deadline) and deadline >= 0):
        raise OwnerError(Reason.ARGUMENT_INVALID, f"options.drain_deadline_s: {deadline} is not a number from 0 up")
    if message.drain_deadline_s and drain is not Drain.DEADLINE:
        raise OwnerError(Reason.ARGUMENT_INVALID, "options.drain_deadline_s: goes with DRAIN_MODE_DEADLINE only")
    return replace(
        configured,
        verify=_choice("options.verify", message.verify, _VERIFY, configured.verify),
        target_check=_choice("options.target_check", message.target_check, _TARGET_CHECK, configured.target_check),
        drain=drain,
        drain_deadline_s=deadline,
        allow_irreversible=message.allow_irreversible or configured.allow_irreversible,
        allow_nonfinite=message.allow_nonfinite or configured.allow_nonfinite,
    )


def request_digest(kind: str, message: Message) -> str:
    """What a caller asks for, less its name for it: the same id with another digest is refused."""
    body = type(message)()
    body.CopyFrom(message)
    for field in ("request_id", "etag"):
        body.ClearField(field)
    return blake3(json.dumps([kind, body.SerializeToString(deterministic=True).hex()]).encode()).hexdigest()


def check_request_id(value: str) -> None:
    if len(value) > REQUEST_ID_MAX:
        raise OwnerError(Reason.ARGUMENT_INVALID, f"request_id: is longer than {REQUEST_ID_MAX} characters")


def _choice(field: str, value: int, table: Mapping[Any, E], default: E) -> E:
    if value == 0:
        return default
    if value not in table:
        raise OwnerError(Reason.ARGUMENT_INVALID, f"{field}: {value} is none of its values")
    return table[value]


def variant_of(request: owner_pb2.PrepareVariantRequest) -> Variant:
    """Raises OwnerError: ARGUMENT_INVALID."""
    if not 1 <= request.batch <= ACTIVE_MAX:
        raise OwnerError(Reason.ARGUMENT_INVALID, f"batch: {request.batch} is not from 1 to {ACTIVE_MAX}")
    if not request.length:
        raise OwnerError(Reason.ARGUMENT_INVALID, "length: is 0")
    return Variant(request.batch, request.length)
