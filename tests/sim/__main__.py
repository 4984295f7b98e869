"""The crash simulation: ``make sim``.

Every scenario is crashed at every point, and again inside the recovery; then random lives are led, with three crashes
and more. What it finds it reports with the one line that shows it again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path

from sim.crash import CrashError, Explorer, Report
from sim.scenarios import SCENARIOS, World
from sim.walk import Walk

WALKS = 60
WALK_CRASHES = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="decides what torn writes leave, and the random lives")
    parser.add_argument("--depth", type=int, default=2, help="crashes in a row at every point (default 2)")
    parser.add_argument("--only", choices=[*SCENARIOS, "walks"], help="one scenario, or the random lives alone")
    parser.add_argument("--walks", type=int, default=WALKS, help=f"random lives (default {WALKS}); 0: none")
    parser.add_argument("--crashes", type=int, default=WALK_CRASHES, help="crashes in each random life (default 3)")
    options = parser.parse_args()
    names = [] if options.only == "walks" else [options.only] if options.only else list(SCENARIOS)
    walks = 0 if options.only not in {None, "walks"} else options.walks
    print(f"seed {options.seed}", flush=True)
    start, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="rowlock-sim-") as root, ProcessPoolExecutor(os.cpu_count()) as pool:
        lives = range(options.seed, options.seed + walks)
        exploring = pool.map(partial(_explore, root, options.seed, options.depth), names)
        walking = pool.map(partial(_walk, root, options.crashes), lives, chunksize=4)  # short: last, to fill the gaps
        for name, (report, problem) in zip(names, exploring, strict=True):
            failed += bool(problem)
            print(
                f"{name}: {report.images} moments, {report.crashes} crashes, {report.recoveries} recoveries", flush=True
            )
            _tell(problem, f"make sim SIM='--seed {options.seed} --depth {options.depth} --only {name}'")
        for seed, problem in zip(lives, walking, strict=True):
            failed += bool(problem)
            _tell(problem, f"make sim SIM='--only walks --seed {seed} --walks 1 --crashes {options.crashes}'")
    print(f"{walks} random lives of {options.crashes} crashes; {failed} broken laws; {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


def _tell(problem: str, rerun: str) -> None:
    if problem:
        print(f"  BROKEN {problem}\n  rerun: {rerun}", flush=True)


@cache
def _kept(root: str) -> World:
    """The checkpoints of this process."""
    return World.make(Path(root) / str(os.getpid()))


def _explore(root: str, seed: int, depth: int, name: str) -> tuple[Report, str]:
    explorer = Explorer(_kept(root), seed, depth)
    try:
        explorer.explore(SCENARIOS[name])
    except CrashError as error:
        return explorer.report, str(error)
    return explorer.report, ""


def _walk(root: str, crashes: int, seed: int) -> str:
    try:
        Walk(_kept(root), seed, crashes).run()
    except CrashError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main())
