"""The one table of reasons."""

from __future__ import annotations

import grpc

from rowlock.v1.errors import REASONS, OwnerError, Reason


def test_every_reason_has_a_row_with_a_hint() -> None:
    assert set(REASONS) == set(Reason)
    for info in REASONS.values():
        assert info.hint
        assert info.exit_code in {2, 3, 6, 7, 8, 9}
        assert info.status is not grpc.StatusCode.OK


def test_what_to_do_follows_from_the_status() -> None:
    """Retry the call, re-read and retry, fix the state first, bytes differ."""
    status = {reason: info.status for reason, info in REASONS.items()}
    code = grpc.StatusCode
    assert {r for r, s in status.items() if s is code.UNAVAILABLE} == {
        Reason.STOPPING, Reason.INTERRUPTED, Reason.SOURCE_ABSENT, Reason.SOURCE_FAILED, Reason.STAGING_FAILED,
    }  # fmt: skip
    assert {r for r, s in status.items() if s is code.ABORTED} == {
        Reason.DRAINED, Reason.ETAG_STALE, Reason.GENERATION_STALE, Reason.IDENTITY_DIFFERS, Reason.PLAN_CHANGED,
        Reason.TRANSITION_OPEN,
    }  # fmt: skip
    assert {r for r, s in status.items() if s is code.DATA_LOSS} == {Reason.DRIFT, Reason.VERIFY_MISMATCH}


def test_every_reason_has_an_http_status_and_what_may_be_tried_again_is_a_503_or_429() -> None:
    assert all(400 <= info.http_status < 600 for info in REASONS.values())
    http = {reason: info.http_status for reason, info in REASONS.items()}
    for reason in (Reason.EMPTY, Reason.QUARANTINED, Reason.STOPPING, Reason.DRAINED):
        assert http[reason] == 503
    assert (http[Reason.QUEUE_FULL], http[Reason.CONTEXT_EXCEEDED], http[Reason.IDENTITY_DIFFERS]) == (429, 400, 409)


def test_an_error_carries_the_tables_hint_unless_it_knows_better() -> None:
    assert OwnerError(Reason.EMPTY, "x").hint == REASONS[Reason.EMPTY].hint
    assert OwnerError(Reason.EMPTY, "x", "do y").hint == "do y"
