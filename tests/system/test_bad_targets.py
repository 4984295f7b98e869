"""Bad targets through the real daemon: each ends with the old answer, the old identity, a reason, the daemon alive."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import EMBED, NORM, Q0, TINY, change_rows, copy, random_tensors, write_tiny, write_weights
from support.daemons import answer, owner, states, transition

from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.v1 import owner_pb2

Make = Callable[[Path, Path], object]
Tensors = dict[TensorInfo, bytes]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("roots")


@pytest.fixture(scope="module")
def daemon(roots: Path, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    state = tmp_path_factory.mktemp("daemon")
    config = state / "rowlock.toml"
    config.write_text(f'[transition]\ntarget_roots = ["{roots}", "{tiny.parent}"]\n')
    arguments = ["--checkpoint", str(tiny), "--threads", "1", "--config", str(config)]
    with DaemonProcess(state / "state", arguments) as process:
        yield process


def weights(change: Callable[[Tensors], Tensors]) -> Make:
    def make(tiny: Path, path: Path) -> None:
        write_weights(copy(tiny, path), change(random_tensors(TINY, 0)))

    return make


def renamed(tensors: Tensors, name: str, **fields: object) -> Tensors:
    """One tensor described otherwise, its bytes as they were."""
    return {
        (TensorInfo(**{"name": k.name, "dtype": k.dtype, "shape": k.shape, **fields}) if k.name == name else k): v  # type: ignore[arg-type]
        for k, v in tensors.items()
    }


def raw(change: Callable[[dict[str, object], bytes], tuple[bytes, bytes]]) -> Make:
    """The weight file's header and data, changed below any library."""

    def make(tiny: Path, path: Path) -> None:
        file = copy(tiny, path) / "model.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header, data = change(json.loads(content[8 : 8 + length]), content[8 + length :])
        file.write_bytes(len(header).to_bytes(8, "little") + header + data)

    return make


def encoded(header: dict[str, object]) -> bytes:
    return json.dumps(header).encode()


def index(weight_map: dict[str, str]) -> Make:
    def make(tiny: Path, path: Path) -> None:
        copy(tiny, path)
        (path / "model.safetensors").unlink()
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return make


def config(**changes: object) -> Make:
    def make(tiny: Path, path: Path) -> None:
        copy(tiny, path)
        (path / "config.json").write_text(json.dumps({**TINY, **changes}))

    return make


def duplicated(header: dict[str, object], data: bytes) -> tuple[bytes, bytes]:
    return encoded(header)[:-1] + b"," + json.dumps({NORM: header[NORM]}).encode()[1:], data


def duplicated_last_tiles(header: dict[str, object], data: bytes) -> tuple[bytes, bytes]:
    wrong = {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}
    return json.dumps({NORM: wrong}).encode()[:-1] + b"," + encoded(header)[1:], data


def shifted(by: int) -> Callable[[dict[str, object], bytes], tuple[bytes, bytes]]:
    def change(header: dict[str, object], data: bytes) -> tuple[bytes, bytes]:
        last = max((name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"][0])  # type: ignore[index]
        entry = header[last]
        entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]  # type: ignore[index]
        return encoded(header), data + b"\0" * max(by, 0)

    return change


def overflowing(header: dict[str, object], data: bytes) -> tuple[bytes, bytes]:
    header[NORM]["shape"] = [2**62, 2**62, 64]  # type: ignore[index]
    return encoded(header), data


def huge_header(tiny: Path, path: Path) -> None:
    with open(copy(tiny, path) / "model.safetensors", "r+b") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(150_000_000)


def truncated(tiny: Path, path: Path) -> None:
    file = copy(tiny, path) / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def linked_out(tiny: Path, path: Path) -> None:
    copy(tiny, path)
    outside = path.parent.parent / "outside.safetensors"
    (path / "model.safetensors").rename(outside)
    (path / "model.safetensors").symlink_to(outside)


def tied_differs(tensors: Tensors) -> Tensors:
    embed = next(info for info in tensors if info.name == EMBED)
    return {**tensors, TensorInfo("lm_head.weight", "BF16", embed.shape): bytes(embed.nbytes)}


def nan_rows(tiny: Path, path: Path) -> None:
    change_rows(tiny, path, Q0, [1], lambda row: np.full(len(row) // 2, 0x7FC0, np.uint16).tobytes())


CASES: dict[str, tuple[Make, str, str]] = {
    "larger hidden size": (config(hidden_size=128), "TARGET_INVALID", "embed_tokens"),
    "tensor missing": (weights(lambda t: {k: v for k, v in t.items() if k.name != Q0}), "TARGET_INVALID", Q0),
    "tensor added": (weights(lambda t: {**t, TensorInfo("x.y", "BF16", (2,)): b"\0" * 4}), "TARGET_INVALID", "x.y"),
    "another dtype": (weights(lambda t: renamed(t, NORM, dtype="F16")), "TARGET_INVALID", "BF16, F16"),
    "another shape, same elements": (
        weights(lambda t: renamed(t, Q0, shape=(32, 128))), "TARGET_INVALID", "[32, 128]"),
    "truncated": (truncated, "TARGET_INVALID", "truncated"),
    "absent shard": (index({NORM: "gone.safetensors"}), "TARGET_NOT_FOUND", "gone.safetensors"),
    "index escapes": (index({NORM: "../../etc/passwd"}), "TARGET_INVALID", "../../etc/passwd"),
    "duplicate key": (raw(duplicated), "TARGET_INVALID", NORM),
    "duplicate key, only the last tiles": (raw(duplicated_last_tiles), "TARGET_INVALID", NORM),
    "trailing bytes": (raw(lambda h, d: (encoded(h), d + b"\0" * 8)), "TARGET_INVALID", "after the last tensor"),
    "hole": (raw(shifted(8)), "TARGET_INVALID", "hole"),
    "overlap": (raw(shifted(-8)), "TARGET_INVALID", "overlaps"),
    "header of 100 MB": (huge_header, "TARGET_INVALID", "over the limit"),
    "shape that overflows": (raw(overflowing), "TARGET_INVALID", "impossible shape"),
    "link out of the roots": (linked_out, "TARGET_INVALID", "configured roots"),
    "tied pair differs": (weights(tied_differs), "TARGET_INVALID", "lm_head.weight"),
    "new NaN rows": (nan_rows, "NONFINITE", "64 values"),
    "unknown architecture": (config(model_type="mamba"), "TARGET_INVALID", "model_type"),
    "no tokenizer": (
        lambda tiny, path: (copy(tiny, path) / "tokenizer.json").unlink(), "TARGET_INVALID", "tokenizer.json"),
    "unknown activation": (config(hidden_act="relu"), "TARGET_INVALID", "hidden_act"),
    "not a directory": (lambda tiny, path: path.write_text("x"), "TARGET_NOT_FOUND", "no such directory"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_bad_target_leaves_the_old_answer(daemon: DaemonProcess, tiny: Path, roots: Path, case: str) -> None:
    make, reason, says = CASES[case]
    before, identity, target = answer(daemon), owner(daemon).identity, roots / case.replace(" ", "-")
    make(tiny, target)
    try:
        record = transition(daemon, target=str(target))[-1].record
        found, message, ended_well = record.reason, record.message, record.state == owner_pb2.TRANSITION_STATE_FAILED
    except ClientError as error:
        found, message, ended_well = error.reason, str(error), bool(error.hint)
    assert (found, ended_well) == (reason, True)
    assert says in message
    assert answer(daemon) == before
    assert owner(daemon).identity == identity
    assert daemon.process.poll() is None


def test_outside_the_roots_is_refused_whatever_it_is(daemon: DaemonProcess, tmp_path: Path) -> None:
    good = write_tiny(tmp_path / "good", seed=3)
    with pytest.raises(ClientError, match="configured roots") as caught:
        transition(daemon, target=str(good))
    assert caught.value.reason == "TARGET_INVALID"


def test_equal_and_tokenizer_only_targets_are_taken(daemon: DaemonProcess, tiny: Path, roots: Path) -> None:
    assert states(transition(daemon, target=str(tiny)))[-1] == "NOOP"
    target = copy(tiny, roots / "tokenizer-only")
    (target / "generation_config.json").write_text('{"eos_token_id": 9}')
    record = transition(daemon, target=str(target))[-1].record
    assert (record.state, record.rows_written) == (owner_pb2.TRANSITION_STATE_PUBLISHED, 0)
    assert states(transition(daemon, target=str(tiny)))[-1] == "PUBLISHED"
