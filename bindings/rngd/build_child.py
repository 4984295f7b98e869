"""``python -m rowlock.bindings.rngd.build_child DIRECTORY EXECUTION``: see :mod:`rowlock.bindings.rngd.builder`.

Reads what it is asked for from its standard input, and needs no card.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rowlock.bindings.children import end_with_parent
from rowlock.bindings.rngd import sdk
from rowlock.bindings.rngd.artifacts import ArtifactStore
from rowlock.bindings.rngd.builder import BUILT
from rowlock.bindings.rngd.engine import CardEngine, Engine, ReferenceEngine
from rowlock.bindings.rngd.programs import ProgramKeys, build_missing
from rowlock.bindings.rngd.shape import ProgramSet


def main(programs: Path, execution: str) -> None:
    end_with_parent(os.getppid())
    sdk.claim_fusion()
    engine: Engine = CardEngine(0, programs / "compiler") if execution == CardEngine.execution else ReferenceEngine()
    keys = ProgramKeys(execution, sdk.versions())
    for name in build_missing(engine, ArtifactStore(programs), keys, ProgramSet.from_json(sys.stdin.read())):
        print(BUILT, name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
