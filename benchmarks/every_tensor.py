"""For every tensor of a checkpoint: one row changed by B2 gives logits bit-equal to a fresh load of the target.

    python benchmarks/every_tensor.py --checkpoint DIR [--after NUMBER]

The fresh load is a second owner that loads the target from its files. Then each change is
rolled back, and the logits are bit-equal to those from before. What a change does not move is listed: there it proves
nothing. With --after a run that was cut short goes on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from model.test_every_tensor import equal_in, logits
from support.checkpoints import change_rows, negate
from support.owners import running_owner

from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.plan import Require


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--after", type=int, default=0)
    options = parser.parse_args()
    base, start = options.checkpoint.resolve(), time.monotonic()
    wrong: list[str] = []
    unseen: list[str] = []
    with Checkpoint.open(base) as checkpoint:
        tensors = checkpoint.own_tensors
    with tempfile.TemporaryDirectory(prefix="rowlock-every-") as name, running_owner(Path(name) / "s", base) as owner:
        before = logits(owner)
        for number, (tensor, info) in list(enumerate(tensors.items(), start=1))[options.after :]:
            row = 99 if "embed" in tensor else info.rows // 2
            target = change_rows(base, Path(name) / "target", tensor, [row], negate)
            published = owner.transition(target, Require.B2).state == "PUBLISHED"
            after = logits(owner)
            with running_owner(Path(name) / f"fresh{number}", target) as fresh:
                equal = equal_in(after, logits(fresh)) == list(before)
            back = owner.rollback().state == "PUBLISHED" and equal_in(logits(owner), before) == list(before)
            right = published and equal and back
            wrong += [] if right else [tensor]
            unseen += [f"{tensor} in {part}" for part in equal_in(after, before)]
            for path in target.iterdir():
                path.unlink()
            target.rmdir()
            print(f"{number}/{len(tensors)} {tensor}: {'equal' if right else 'DIFFERS'}", flush=True)
    print(f"{len(tensors) - options.after} tensors, {len(wrong)} wrong, {time.monotonic() - start:.0f} s")
    print(f"changes that moved no bit of some logits: {unseen or 'none'}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
