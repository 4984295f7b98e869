"""An owner needs no privileges: the real daemon, on the device of the run, as a user who has none.

Run as root it is started as nobody, without capabilities and without a way to any. Run as anybody else it is started as
that user, who must not have any either.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import EMBED, change_rows, negate, write_tiny
from support.daemons import answer, owner, states, transition
from support.devices import device_of_owners

from rowlock.cli.daemon_process import DaemonProcess, Launcher
from rowlock.v1 import owner_pb2

NOBODY = 65534
DROPPED = (
    "setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs",
    "--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all",
)  # fmt: skip


def status_of(pid: int | str) -> dict[str, list[str]]:
    """``/proc/PID/status``, by field."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.split() for name, _, value in (line.partition(":") for line in lines)}


def launcher() -> Launcher | None:
    """How to start a process without privileges; skips, with the reason, where there is no way."""
    if os.geteuid() != 0:
        held = status_of("self")["CapEff"]
        if int(held[0], 16):
            pytest.skip(f"NOT CHECKED: this user has capabilities ({held[0]}), and is not root to drop them")
        return None
    if shutil.which(DROPPED[0]) is None:
        pytest.skip("NOT CHECKED: setpriv (util-linux) is not installed, and this is root")
    # a second time from within: the daemon starts processes, too, and setpriv itself may still reach what nobody cannot
    again = "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'import rowlock.cli'])"
    tried = subprocess.run(
        [*DROPPED, sys.executable, "-c", again], capture_output=True, text=True, check=False, cwd="/"
    )
    if tried.returncode != 0:
        pytest.skip(f"NOT CHECKED: nobody cannot run this checkout: {tried.stderr.strip()[-300:]}")
    return Launcher(DROPPED, NOBODY)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that others may enter: pytest's own are for their owner alone."""
    with tempfile.TemporaryDirectory(prefix="rowlock-test-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


def test_an_owner_without_privileges_starts_changes_its_model_and_stops(place: Path) -> None:
    started, device = launcher(), device_of_owners()
    base = write_tiny(place / "base", max_position_embeddings=256)
    target = change_rows(base, place / "target", EMBED, list(range(0, 200, 2)), negate)
    mine = place / "mine"
    mine.mkdir()
    if started is not None:
        os.chown(mine, started.user, -1)
    options = ["--checkpoint", str(base), "--threads", "1", "--device", device.settings["device"]]
    options += ["--without-hardware"] if device.settings.get("without_hardware") else []
    environment = {**device.environment(), "HOME": str(mine), "XDG_CACHE_HOME": str(mine)}
    with DaemonProcess(place / "state", options, environment, launcher=started) as daemon:
        status = status_of(daemon.process.pid)
        assert set(status["Uid"]) == {str(started.user if started else os.geteuid())} != {"0"}
        for kind in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
            assert int(status[kind][0], 16) == 0, f"{kind}: {status[kind]}"
        if started is not None:
            assert (status["Groups"], status["NoNewPrivs"], int(status["CapBnd"][0], 16)) == ([], ["1"], 0)
        before, _ = answer(daemon)
        for level in (owner_pb2.REQUIRE_B2, owner_pb2.REQUIRE_B1):
            events = transition(daemon, target=str(target), require=level)
            assert states(events)[-1] == "PUBLISHED", events[-1].record.message
            assert answer(daemon)[0] != before
            assert states(transition(daemon, target=str(base)))[-1] == "PUBLISHED"
        assert (answer(daemon)[0], owner(daemon).generation) == (before, 5)
    assert daemon.process.returncode == 0, daemon.log.read_text()
