"""Plant each bug in a copy of the package, and run all tests of the laws on it: ``make planted``.

The harness does not pick tests: each bug faces the same set, and is named with the first that caught it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from planted.bugs import Bug, bugs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ("bindings", "cli", "daemon", "journal", "proto", "src")
LAWS = (
    "tests/sim/test_laws.py",
    "tests/sim/test_public_reports.py",
    "tests/unit/test_files.py",
    "tests/system/test_serving.py::test_no_prefix_outlives_its_identity",
    "tests/sim/test_crash.py",
    "tests/sim/test_machine.py",
    "tests/sim/test_reasons.py",
)
"""The tests of the laws: all of them, the quickest first. The table of faults is no law."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m planted", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=[bug.name for bug in bugs()])
    parser.add_argument("--write", action="store_true", help="write docs/planted.md anew")
    options = parser.parse_args()
    chosen = [bug for bug in bugs() if options.only in {None, bug.name}]
    with tempfile.TemporaryDirectory(prefix="rowlock-planted-") as root:
        clean = caught_by(Path(root), None)
        if clean:
            print(f"the laws fail on the sources as they are: {clean}")
            return 1
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = {}
            for bug, test in zip(chosen, pool.map(partial(caught_by, Path(root)), chosen), strict=True):
                found[bug] = test
                print(f"{bug.name}: {test or 'NOT CAUGHT'}", flush=True)
    if options.write:
        (ROOT / "docs" / "planted.md").write_text(page(found))
    return 0 if all(found.values()) else 1


def caught_by(root: Path, bug: Bug | None) -> str:
    """The first test of the laws that fails, or empty."""
    copy = root / (re.sub(r"\W", "-", bug.name) if bug else "clean")
    for folder in PACKAGE:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    if bug is not None:
        bug.plant(copy)
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", "--timeout=600", *LAWS,
    ]  # fmt: skip
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    shutil.rmtree(copy)
    if told.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", told.stdout, re.MULTILINE)
    assert failed is not None, told.stdout + told.stderr
    return failed.group(1)


def page(found: dict[Bug, str]) -> str:
    lines = [
        "# Planted bugs",
        "",
        "<!-- Made by `make planted PLANTED=--write`. -->",
        "",
        "Each of these bugs was planted in a copy of the package, and all tests of the laws were run on it: the",
        "harness picks none. Named is the first that failed. `make planted` plants them again.",
        "",
        "| bug | where | caught by |",
        "|---|---|---|",
        *(f"| {bug.name} | `{bug.file}` | `{test.replace('|', ' ')}` |" for bug, test in found.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
