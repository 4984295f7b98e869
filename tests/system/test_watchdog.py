"""A device call that does not come back."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows, negate
from support.owners import running_owner

from rowlock.daemon.owner.states import OwnerState
from rowlock.journal.journal import Journal
from rowlock.v1.errors import OwnerError, Reason


@pytest.mark.parametrize("call", ["write_rows", "read_rows", "fence"])
def test_a_hanging_call_quarantines_and_everybody_is_told(tiny: Path, tmp_path: Path, call: str) -> None:
    target = change_rows(tiny, tmp_path / "target", EMBED, [5], negate)
    release = threading.Event()
    with running_owner(tmp_path / "state", tiny, call_timeout_s=0.3) as owner:
        memory = owner.core.binding.memory._inner
        real = getattr(memory, call)

        def hang(*arguments):  # type: ignore[no-untyped-def]
            release.wait(60)
            return real(*arguments)

        setattr(memory, call, hang)
        transition = owner.begin(target)
        waiting = owner.ask("abc", 5)
        owner.end_of(transition)
        view = owner.owner.view
        assert view.state is OwnerState.QUARANTINED
        assert f"the device call {call} did not come back" in view.quarantined
        with contextlib.suppress(OwnerError):  # it may have been answered before
            assert len(waiting.wait()) == 5
        with pytest.raises(OwnerError) as caught:
            owner.verify()
        assert caught.value.reason is Reason.QUARANTINED
        assert owner.owner.journal.find(transition) is not None, "reads still answer"
        release.set()
        owner.owner._thread.join(30)
        assert not owner.owner._thread.is_alive(), "a call that comes back too late ends the thread"


def hang_on(target: object, name: str) -> threading.Event:
    """Make a method wait; setting the event lets it go on."""
    release, entered = threading.Event(), threading.Event()
    real = getattr(target, name)

    def hang(*arguments):  # type: ignore[no-untyped-def]
        entered.set()
        release.wait(60)
        return real(*arguments)

    setattr(target, name, hang)
    release.entered = entered  # type: ignore[attr-defined]
    return release


def test_a_request_being_admitted_and_those_behind_it_are_told(tiny: Path, tmp_path: Path) -> None:
    with running_owner(tmp_path / "state", tiny, call_timeout_s=0.3) as owner:
        release = hang_on(owner.core.resident.runtime._inner, "open_sequence")
        answers = [owner.ask("abc", 5) for _ in range(3)]
        for answer in answers:
            with pytest.raises(OwnerError) as caught:
                answer.wait()
            assert caught.value.reason is Reason.QUARANTINED
        release.set()


def test_commands_behind_a_hanging_one_are_refused(tiny: Path, tmp_path: Path) -> None:
    with running_owner(tmp_path / "state", tiny, call_timeout_s=0.3) as owner:
        release = hang_on(owner.core.binding.memory._inner, "read_rows")
        verification = owner.owner.verify()
        release.entered.wait(10)  # type: ignore[attr-defined]
        answer = owner.ask("abc", 5)
        for wait in (lambda: verification.result(30), answer.wait):
            with pytest.raises(OwnerError) as caught:
                wait()
            assert caught.value.reason is Reason.QUARANTINED
        release.set()


def test_stop_returns_although_a_call_hangs(tiny: Path, tmp_path: Path) -> None:
    with running_owner(tmp_path / "state", tiny, call_timeout_s=1.0) as owner:
        release = hang_on(owner.core.binding.memory._inner, "read_rows")
        owner.owner.verify()
        release.entered.wait(10)  # type: ignore[attr-defined]
        stopper = threading.Thread(target=owner.owner.stop)
        stopper.start()
        stopper.join(30)
        assert not stopper.is_alive()
        release.set()


def test_quarantine_survives_a_restart_until_it_is_released(tiny: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running_owner(state, tiny) as owner:
        identity = owner.identity
        owner.core.quarantine("planted")
    with running_owner(state, None) as owner:
        assert owner.owner.view.state is OwnerState.QUARANTINED
        assert owner.owner.view.resident is None
        with pytest.raises(OwnerError) as caught:
            owner.transition(tiny)
        assert caught.value.reason is Reason.QUARANTINED
        owner.owner.release_quarantine("alice", "the card was replaced")
        assert owner.owner.view.state is OwnerState.QUARANTINED, "only a later process may create a runtime"
    with running_owner(state, None) as owner:
        assert owner.identity == identity
        with pytest.raises(OwnerError) as caught:
            owner.owner.release_quarantine("alice", "again")
        assert caught.value.reason is Reason.NOT_QUARANTINED
    journal = Journal(state, "cpu")
    rows = journal._file.rows("SELECT who, why FROM quarantine")
    assert rows == [{"who": "alice", "why": "the card was replaced"}]
