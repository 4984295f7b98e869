"""The process that stages: what it answers, how it ends, and what it leaves behind."""

from __future__ import annotations

import fcntl
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.checkpoints import NORM, TINY, random_tensors, write_tiny, write_weights

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.hashing import Hasher
from rowlock.bindings.model.layout import Layout, ParentInfo
from rowlock.daemon.staging import process as module
from rowlock.daemon.staging.apart import ApartStager
from rowlock.daemon.staging.orders import Digest, FileList, Reserve, Share
from rowlock.daemon.staging.process import NICENESS, StagingProcess
from rowlock.daemon.staging.shared import new_memory
from rowlock.v1.errors import OwnerError, Reason

WAIT_S = 30


@pytest.fixture
def process() -> Iterator[StagingProcess]:
    process = StagingProcess(1)
    yield process
    process.close()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(write_tiny(tmp_path / "c")) as checkpoint:
        yield checkpoint


def child_of(process: StagingProcess) -> psutil.Process:
    return psutil.Process(process._process.pid)


def test_digests_are_those_of_this_process_and_progress_is_told(
    process: StagingProcess, checkpoint: Checkpoint
) -> None:
    listed, descriptors = FileList.of(checkpoint.files)
    told: list[int] = []
    found = process.submit(Digest(listed), descriptors, told.append).result(WAIT_S)
    with ThreadPoolExecutor(1) as executor:
        assert found == Hasher(executor).tensor_digests(checkpoint.files)
    assert sum(told) == sum(info.nbytes for info in checkpoint.tensors.values())


def test_whoever_is_told_can_call_it_off(process: StagingProcess, checkpoint: Checkpoint) -> None:
    def enough(_count: int) -> None:
        raise KeyError("enough")

    listed, descriptors = FileList.of(checkpoint.files)
    with pytest.raises(KeyError, match="enough"):
        process.submit(Digest(listed), descriptors, enough).result(WAIT_S)
    child_of(process).wait(WAIT_S)


def test_a_file_is_read_through_its_descriptor_whatever_its_path_holds_now(
    process: StagingProcess, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as executor:
        wanted = Hasher(executor).tensor_digests(checkpoint.files)
    write_weights(tmp_path / "c", random_tensors(TINY, 1))
    listed, descriptors = FileList.of(checkpoint.files)
    assert process.submit(Digest(listed), descriptors).result(WAIT_S) == wanted


def test_an_error_comes_back_as_it_is(process: StagingProcess, checkpoint: Checkpoint) -> None:
    path = checkpoint.extents[NORM].path
    os.truncate(path, path.stat().st_size - 1)
    listed, descriptors = FileList.of(checkpoint.files)
    with pytest.raises(CheckpointError, match="ends at byte") as caught:
        process.submit(Digest(listed), descriptors).result(WAIT_S)
    assert (caught.value.fault, caught.value.path) == (CheckpointFault.CHANGED, path)
    assert process.submit(Share(1, {"p": 1}), [new_memory({"p": 1})]).result(WAIT_S) is None, "it did not live on"


@pytest.mark.parametrize(
    "error",
    [
        OwnerError(Reason.DRIFT, "a: rows 1 to 2", "do this"),
        CheckpointError(CheckpointFault.INDEX, Path("/x/y"), "has no weight_map", "mend it"),
    ],
)
def test_errors_survive_the_way(error: OwnerError | CheckpointError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_memory_that_cannot_be_had_is_an_error_with_the_number(process: StagingProcess) -> None:
    sizes = {"p": 1 << 20}
    sealed = os.memfd_create("rowlock-images", os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, 1 << 20)
    process.submit(Share(1, sizes), [sealed]).result(WAIT_S)
    os.ftruncate(sealed, 0)
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(MemoryError, match="1048576 bytes for images cannot be had"):
        process.submit(Reserve(1)).result(WAIT_S)


def test_a_killed_process_fails_what_waits_and_what_comes_after(process: StagingProcess) -> None:
    child = child_of(process)
    child.suspend()
    waiting = process.submit(Share(1, {"p": 1}), [new_memory({"p": 1})])
    child.send_signal(signal.SIGKILL)
    for future in (waiting, process.submit(Reserve(1))):
        with pytest.raises(OwnerError, match="was ended by SIGKILL") as caught:
            future.result(WAIT_S)
        assert caught.value.reason is Reason.STAGING_FAILED


def test_it_runs_nicer_than_its_owner_and_heeds_no_signal_meant_for_that(process: StagingProcess) -> None:
    child = child_of(process)
    process.submit(Share(1, {"p": 1}), [new_memory({"p": 1})]).result(WAIT_S)
    assert child.nice() == min(os.getpriority(os.PRIO_PROCESS, 0) + NICENESS, 19)
    assert len(child.threads()) > 1
    for thread in child.threads():
        assert os.getpriority(os.PRIO_PROCESS, thread.id) == child.nice(), "one of its threads has another priority"
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)
    process.submit(Reserve(1)).result(WAIT_S)


def test_no_process_no_descriptor_and_no_memory_is_left() -> None:
    own = psutil.Process()
    gc.collect()  # what errors of other tests still hold
    with ThreadPoolExecutor(1) as executor:
        for round_ in range(3):
            stager = ApartStager(StagingProcess(1), executor, StagingProcess.close)
            child = child_of(stager._process)
            images = stager.new_images(Layout({"p": ParentInfo("p", "BF16", 1 << 20, 8)}, {}), ["p"])
            stager.at_hand(images)
            del images
            stager.close()
            child.wait(WAIT_S)
            for thread in listeners():
                thread.join(WAIT_S)
            if round_ == 0:
                descriptors = own.num_fds()
            assert own.num_fds() == descriptors
            assert not any("rowlock-images" in item.path for item in own.memory_maps())


def listeners() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "rowlock-staging"]


def test_it_ends_with_an_owner_that_is_killed() -> None:
    code = (
        "import time\n"
        "from rowlock.daemon.staging.process import StagingProcess\n"
        "from rowlock.daemon.staging.orders import Share\n"
        "from rowlock.daemon.staging.shared import new_memory\n"
        "process = StagingProcess(1)\n"
        "process.submit(Share(1, {'p': 1}), [new_memory({'p': 1})]).result(30)\n"
        "print(process._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.communicate()
    psutil.wait_procs([child], WAIT_S)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_process_that_cannot_be_started_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise BlockingIOError("too many processes")

    before = psutil.Process().num_fds()
    monkeypatch.setattr(module.subprocess, "Popen", refuse)
    with pytest.raises(BlockingIOError):
        StagingProcess(1)
    assert psutil.Process().num_fds() == before
