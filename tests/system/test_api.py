"""The rest of the API, on the real daemon process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.certificates import write_certificates
from support.checkpoints import EMBED, change_rows, negate, read_tensor
from support.commands import rowlock
from support.daemons import answer, begin, owner, refused, states, transition
from support.disks import mounted_tmpfs

from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import inference_pb2, owner_pb2, owner_pb2_grpc
from rowlock.v1.errors import Reason


@pytest.fixture
def daemon(tmp_path: Path, tiny: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "state", ["--checkpoint", str(tiny), "--threads", "1"]) as process:
        yield process


@pytest.fixture
def target(tiny: Path, tmp_path: Path) -> Path:
    return change_rows(tiny, tmp_path / "target", EMBED, [5, 200], negate)


def long_answer(daemon: DaemonProcess, tokens: int = 1800):  # type: ignore[no-untyped-def]
    """A request in flight; its first message has arrived."""
    call = daemon.client.inference.Generate(
        inference_pb2.GenerateRequest(prompt="x", max_tokens=tokens, ignore_eos=True)
    )
    next(iter(call))
    return call


def test_push_rows_over_grpc(daemon: DaemonProcess, target: Path) -> None:
    before, data = answer(daemon), read_tensor(target, EMBED)

    def messages(generation: int) -> Iterator[owner_pb2.PushRowsRequest]:
        yield owner_pb2.PushRowsRequest(header=owner_pb2.PushHeader(generation=generation, request_id=f"p{generation}"))
        for row in (200, 5):
            rows = owner_pb2.PushedRows(tensor=EMBED, first_row=row, data=data[row * 128 : (row + 1) * 128])
            yield owner_pb2.PushRowsRequest(rows=rows)

    with pytest.raises(ClientError) as caught:
        list(daemon.client.stream(daemon.client.owner.PushRows, messages(7)))
    assert caught.value.reason == Reason.GENERATION_STALE
    events = [item.event for item in daemon.client.stream(daemon.client.owner.PushRows, messages(1))]
    assert states(events)[-1] == "PUBLISHED"
    assert events[-1].record.rows_written == 2
    assert answer(daemon) != before
    assert transition(daemon, target=str(target))[-1].record.state == owner_pb2.TRANSITION_STATE_NOOP
    with pytest.raises(ClientError) as caught:
        list(daemon.client.stream(daemon.client.owner.PushRows, iter([owner_pb2.PushRowsRequest()])))
    assert caught.value.reason == Reason.ARGUMENT_INVALID


def test_watch_owner_sees_every_generation(daemon: DaemonProcess, target: Path, tiny: Path) -> None:
    seen: list[owner_pb2.Owner] = []
    call = daemon.client.owner.WatchOwner(owner_pb2.WatchOwnerRequest())
    iterator = iter(call)
    seen.append(next(iterator).owner)

    def watch() -> None:
        with contextlib.suppress(grpc.RpcError):
            seen.extend(item.owner for item in iterator)

    watcher = threading.Thread(target=watch)
    watcher.start()
    transition(daemon, target=str(target))
    transition(daemon, target=str(tiny))
    while seen[-1].etag != owner(daemon).etag:
        pass
    call.cancel()
    watcher.join()
    assert [item.generation for item in seen] == sorted(item.generation for item in seen)
    assert seen[-1].generation == 3
    assert len({item.etag for item in seen}) == len(seen)


def test_watch_transition_replays_after_a_restart(daemon: DaemonProcess, target: Path, tmp_path: Path) -> None:
    events = transition(daemon, target=str(target), request_id="r")
    daemon.process.kill()
    daemon.process.wait()
    with DaemonProcess(tmp_path / "state", ["--threads", "1"]) as again:
        request = owner_pb2.WatchTransitionRequest(id="r", after_sequence=2)
        replayed = [item.event for item in again.client.stream(again.client.owner.WatchTransition, request)]
        assert replayed == events[2:]
        assert transition(again, target=str(target), request_id="r") == events


def test_etags_and_options_over_grpc(daemon: DaemonProcess, target: Path) -> None:
    etag = owner(daemon).etag
    assert refused(daemon, target=str(target), etag="stale").reason == Reason.ETAG_STALE
    bad = owner_pb2.TransitionOptions(drain_deadline_s=1)
    assert refused(daemon, target=str(target), options=bad).reason == Reason.ARGUMENT_INVALID
    options = owner_pb2.TransitionOptions(verify=owner_pb2.VERIFY_MODE_ALL)
    record = transition(daemon, target=str(target), etag=etag, options=options)[-1].record
    assert record.verify == owner_pb2.VERIFY_MODE_ALL
    assert record.readback == "storage"


def test_cancel_and_status_from_the_command_line(daemon: DaemonProcess, target: Path) -> None:
    endpoint = daemon.client.endpoint
    running = long_answer(daemon)
    status = rowlock("status", endpoint=endpoint)
    assert "1 active" in status.out
    assert "lease" in status.out
    mover = begin(daemon, target=str(target), request_id="c")
    while not owner(daemon).transition:
        pass
    cancelled = rowlock("cancel", "c", "--json", endpoint=endpoint)
    assert cancelled.code == 0, cancelled.err
    assert cancelled.json["state"] == "CANCELLED"
    assert states(mover.result(30))[-1] == "CANCELLED"
    assert rowlock("cancel", "c", endpoint=endpoint).code == 3
    list(running)
    assert rowlock("transition", "--target", target, endpoint=endpoint).code == 0


def test_unload_from_the_command_line(daemon: DaemonProcess, tiny: Path) -> None:
    endpoint = daemon.client.endpoint
    assert rowlock("unload", endpoint=endpoint).code == 0
    assert rowlock("status", endpoint=endpoint).out.startswith("cpu: EMPTY")
    assert rowlock("generate", "x", endpoint=endpoint).code == 3
    assert rowlock("transition", "--target", tiny, endpoint=endpoint).code == 0
    assert rowlock("generate", "x", endpoint=endpoint).code == 0


def test_quarantine_and_release_on_the_real_process(tmp_path: Path, tiny: Path, target: Path) -> None:
    fault = tmp_path / "fault.json"
    options = ["--checkpoint", str(tiny), "--threads", "1", "--test-fault-file", str(fault)]
    with DaemonProcess(tmp_path / "state", options) as daemon:
        before = answer(daemon)
        fault.write_text('{"operation": "release", "effect": "error", "count": 1000}')
        done = rowlock("transition", "--target", target, "--require", "b1", endpoint=daemon.client.endpoint)
        assert done.code == 6
        assert rowlock("generate", "x", endpoint=daemon.client.endpoint).code == 6
        assert rowlock("status", endpoint=daemon.client.endpoint).out.startswith("cpu: QUARANTINED")
        daemon.process.terminate()
        assert daemon.process.wait(30) == 0
    fault.unlink()
    with DaemonProcess(tmp_path / "state", options, ready=False) as daemon:
        while owner(daemon).state != owner_pb2.OWNER_STATE_QUARANTINED:
            pass
        released = rowlock("release", "--why", "checked the card", endpoint=daemon.client.endpoint)
        assert released.code == 0, released.err
        assert daemon.process.wait(30) == 0
    with DaemonProcess(tmp_path / "state", options) as daemon:
        assert answer(daemon) == before


def test_tcp_is_mtls_with_roles(tmp_path: Path, tiny: Path, target: Path) -> None:
    files = write_certificates(tmp_path / "tls", "server", ["reader", "operator", "stranger"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    config = tmp_path / "rowlock.toml"
    config.write_text(
        f'[tls]\naddress = "{address}"\ncertificate = "{files}/server.pem"\nkey = "{files}/server.key"\n'
        f'client_ca = "{files}/ca.pem"\nreaders = ["reader"]\noperators = ["operator"]\n'
    )

    def stub(name: str) -> owner_pb2_grpc.OwnerServiceStub:
        credentials = grpc.ssl_channel_credentials(
            *((files / item).read_bytes() for item in ("ca.pem", f"{name}.key", f"{name}.pem"))
        )
        options = [("grpc.ssl_target_name_override", "localhost")]
        return owner_pb2_grpc.OwnerServiceStub(grpc.secure_channel(address, credentials, options))

    arguments = ["--checkpoint", str(tiny), "--threads", "1", "--config", str(config)]
    with DaemonProcess(tmp_path / "state", arguments):
        move = owner_pb2.TransitionRequest(target=str(target))
        assert stub("reader").GetOwner(owner_pb2.GetOwnerRequest()).owner.generation == 1
        for name, call in (
            ("reader", lambda who: list(who.Transition(move))),
            ("stranger", lambda who: who.GetOwner(owner_pb2.GetOwnerRequest())),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(stub(name))
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        *_, last = stub("operator").Transition(move)
        assert last.event.state == owner_pb2.TRANSITION_STATE_PUBLISHED
        with grpc.insecure_channel(address) as plain, pytest.raises(grpc.RpcError):
            owner_pb2_grpc.OwnerServiceStub(plain).GetOwner(owner_pb2.GetOwnerRequest(), timeout=2)


def test_systemd_is_told(tmp_path: Path, tiny: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "n"))
        manager.settimeout(60)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "n")}
        with DaemonProcess(tmp_path / "state", ["--checkpoint", str(tiny), "--threads", "1"], environment) as daemon:
            assert b"READY=1" in manager.recv(4096)
            daemon.process.terminate()
            assert b"STOPPING=1" in manager.recv(4096)


def is_recorded(daemon: DaemonProcess, transition: str) -> bool:
    try:
        daemon.client.call(daemon.client.owner.GetTransition, owner_pb2.GetTransitionRequest(id=transition))
    except ClientError:
        return False
    return True


def test_sigterm_during_a_drain_cancels_the_transition(tmp_path: Path, tiny: Path, target: Path) -> None:
    options = ["--checkpoint", str(tiny), "--threads", "1"]
    with DaemonProcess(tmp_path / "state", options) as daemon:
        running = [long_answer(daemon) for _ in range(8)]
        mover = begin(daemon, target=str(target), request_id="m")
        while not is_recorded(daemon, "m"):  # the view names it a moment before the journal does
            time.sleep(0.01)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 0
        with contextlib.suppress(ClientError):
            assert states(mover.result(30))[-1] == "CANCELLED"
        assert len(running) == 8, "a call that nobody refers to is cancelled"
    with DaemonProcess(tmp_path / "state", options) as daemon:
        assert owner(daemon).generation == 1
        got = daemon.client.call(daemon.client.owner.GetTransition, owner_pb2.GetTransitionRequest(id="m"))
        assert got.record.state == owner_pb2.TRANSITION_STATE_CANCELLED


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 6 MiB."""
    with mounted_tmpfs(tmp_path / "disk", "6m", "a full disk") as path:
        yield path


def test_a_full_disk_at_any_durable_step(small_disk: Path, tiny: Path, tmp_path: Path) -> None:
    """Whatever is left on the disk: published, or the old answer with a reason; and the daemon lives on."""
    outcomes = set()
    with DaemonProcess(small_disk / "state", ["--checkpoint", str(tiny), "--threads", "1"]) as daemon:
        for index, left in enumerate(
            (0, 4096, 16384, 65536, 200_000, 400_000, 700_000, 1_200_000, 1_700_000, 3_000_000)
        ):
            target = change_rows(tiny, tmp_path / f"t{index}", EMBED, [index + 1], negate)
            before = answer(daemon)
            status = os.statvfs(small_disk)
            filler = small_disk / "filler"
            with open(filler, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(status.f_bavail * status.f_frsize - left, 1))
            try:
                events = transition(daemon, target=str(target))
                outcome = events[-1].record.reason or states(events)[-1]
            except ClientError as error:
                outcome = error.reason
            filler.unlink()
            outcomes.add(outcome)
            assert outcome in {"PUBLISHED", "JOURNAL_FAILED"}, (left, outcome)
            assert (answer(daemon) == before) == (outcome != "PUBLISHED")
            assert daemon.client.call(daemon.client.owner.Verify, owner_pb2.VerifyRequest()).ok
    assert outcomes == {"PUBLISHED", "JOURNAL_FAILED"}


@pytest.mark.parametrize("phase", ["PLANNED", "STAGED", "JOURNALED", "APPLYING", "PUBLISHED"])
def test_a_client_that_disappears_in_any_phase(daemon: DaemonProcess, target: Path, phase: str) -> None:
    """A separate process that kills itself once it has seen the phase."""
    code = (
        "import os, sys\n"
        "from rowlock.cli.client import Client\n"
        "from rowlock.v1 import owner_pb2\n"
        "client = Client(sys.argv[1], None)\n"
        "request = owner_pb2.TransitionRequest(target=sys.argv[2], request_id='gone')\n"
        "for item in client.owner.Transition(request):\n"
        "    if owner_pb2.TransitionState.Name(item.event.state).endswith(sys.argv[3]): os._exit(7)\n"
    )
    gone = subprocess.run(
        [sys.executable, "-c", code, daemon.client.endpoint, str(target), phase], check=False, timeout=60
    )
    assert gone.returncode == 7
    request = owner_pb2.WatchTransitionRequest(id="gone")
    events = [item.event for item in daemon.client.stream(daemon.client.owner.WatchTransition, request)]
    assert states(events)[-1] == "PUBLISHED"
    assert answer(daemon)[1] == events[-1].record.to.digest


def test_the_readmes_client_example_runs(daemon: DaemonProcess, target: Path) -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    code = readme.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    code = code.replace("unix:/run/rowlock/cpu.sock", daemon.client.endpoint).replace("/models/new", str(target))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "TRANSITION_STATE_PUBLISHED" in done.stdout
    assert owner(daemon).generation == 2
