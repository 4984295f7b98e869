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
    rows = journal._all("SELECT who, why FROM quarantine")
    assert rows == [{"who": "alice", "why": "the card was replaced"}]
