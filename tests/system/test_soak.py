"""The soak: mixed clients, trouble and B2s. `make soak` goes on for a minute, `make test` for some seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.http import with_chat_template

ROOT = Path(__file__).resolve().parents[2]


def soaked(checkpoint: Path, work: Path, seconds: int, *options: str) -> dict[str, dict[str, int]]:
    """The result of a run that broke no law."""
    result = work / "result.json"
    command = [
        sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--checkpoint", str(checkpoint), "--seed", "1",
        "--seconds", str(seconds), "--json", str(result), *options,
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, dict[str, int]] = json.loads(result.read_text())
    return found


def looked_at(result: dict[str, dict[str, int]], identities: int) -> None:
    """So many identities answered at least, over every way in, and something was hung up and refused."""
    counts = result["counts"]
    assert len([name for name in counts if name.startswith("answered by")]) >= identities
    assert all(counts.get(kind) for kind in ("whole", "streamed", "grpc_answer", "hung_up", "trouble"))


def test_some_seconds_of_it(tiny: Path, tmp_path: Path) -> None:
    looked_at(soaked(with_chat_template(tiny, tmp_path / "chat"), tmp_path, 4, "--every", "1", "--threads", "1"), 2)


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_a_minute_of_it(tiny: Path, tmp_path: Path) -> None:
    looked_at(soaked(with_chat_template(tiny, tmp_path / "chat"), tmp_path, 60), 3)
