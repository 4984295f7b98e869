"""What `doctor` makes of a vendor's management tool: scripts of ours on the path say what such a tool would."""

from __future__ import annotations

from pathlib import Path

import pytest

from rowlock.bindings.address import DeviceAddress
from rowlock.bindings.atom import probe as atom
from rowlock.bindings.cuda import probe as cuda
from rowlock.bindings.finding import Finding

ABSENT = (True, "not installed; only for looking")
NPUS = '{"KMD_version": "2.0.1", "devices": [{"npu": 0, "name": "RBLN-CA22", "device": "rbln0", "fw_ver": "1.1"}]}'


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory that is searched for programs, besides those of the shell."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    return tmp_path


def install(path: Path, name: str, out: str, code: int = 0) -> None:
    (path / f"{name}.out").write_text(out)
    tool = path / name
    tool.write_text(f"#!/bin/sh\necho \"$@\" > '{path}/asked'\ncat '{path}/{name}.out'\nexit {code}\n")
    tool.chmod(0o755)


def said(kind: str, physical: int) -> tuple[bool, str]:
    """The finding of that tool, whatever else is found."""
    findings = {
        "nvidia-smi": lambda: cuda.probe(DeviceAddress("cuda", physical, 0)),
        "rbln-smi": lambda: atom.probe(DeviceAddress("atom", physical, 0), True),
    }[kind]()
    item: Finding = next(item for item in findings if item.name == kind)
    return item.ok, item.detail


@pytest.mark.parametrize("tool", ["nvidia-smi", "rbln-smi"])
def test_a_tool_that_is_absent_fails_or_babbles_does_not_refuse(path: Path, tool: str) -> None:
    assert said(tool, 0) == ABSENT
    install(path, tool, "no driver", code=9)
    assert said(tool, 0) == (True, "ended with 9: no driver")
    for words in ("hello", "[]", '{"devices": [7]}', ""):
        install(path, tool, words)
        assert said(tool, 0) == (True, f"is not understood: {words}")


def test_a_gpu_is_asked_for_by_its_physical_number(path: Path) -> None:
    install(path, "nvidia-smi", "NVIDIA H200, 570.1, 143771 MiB\n")
    assert said("nvidia-smi", 3) == (True, "NVIDIA H200, driver 570.1, 143771 MiB")
    assert "--id=3" in (path / "asked").read_text()


def test_an_npu_that_is_listed_is_named_and_one_that_is_not_is_refused(path: Path) -> None:
    install(path, "rbln-smi", NPUS)
    assert said("rbln-smi", 0) == (True, "RBLN-CA22, driver 2.0.1, firmware 1.1")
    assert said("rbln-smi", 1) == (False, "lists no rbln1, but rbln0; driver 2.0.1")
