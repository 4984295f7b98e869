"""The demo on the real model, and the script that recomputes its claims."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from support.commands import rowlock

FIELDS = {
    "name", "ok", "identity", "generation", "text", "level", "rows_written", "bytes_written", "bytes_read_back",
    "drain_ms", "pause_ms", "total_ms", "outcome",
}  # fmt: skip
CHECK = Path(__file__).resolve().parents[2] / "scripts" / "check_demo.py"


def test_demo_and_its_recomputation(real_model: Path, tmp_path: Path) -> None:
    demo = rowlock("demo", "--json", "--checkpoint", real_model, "--work", tmp_path, timeout_s=280)
    assert demo.code == 0, demo.err
    document = demo.json
    assert document["ok"] is True
    assert document["model"] == real_model.name
    for step in document["steps"]:
        assert set(step) >= FIELDS
    texts = {step["name"]: step["text"] for step in document["steps"]}
    assert "Paris" in texts["answer"]
    assert "Rome" in texts["transition"]
    (tmp_path / "demo.json").write_text(demo.out)
    assert check(tmp_path / "demo.json") == 0
    step = next(item for item in document["steps"] if item["name"] == "transition")
    step["rows_written"] += 1
    (tmp_path / "forged.json").write_text(json.dumps(document))
    assert check(tmp_path / "forged.json") == 1, "the check can fail"


def check(document: Path) -> int:
    return subprocess.run([sys.executable, str(CHECK), str(document)], check=False, timeout=280).returncode
