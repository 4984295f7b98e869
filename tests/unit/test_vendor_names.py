"""docs/vendor-private-api.md lists every vendor name that the code uses, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.vendor_names import distribution_of, is_private, names_in, vendor_names

ROOT = Path(__file__).resolve().parents[2]
BINDINGS = ROOT / "bindings"
INVENTORY = ROOT / "docs" / "vendor-private-api.md"

SAMPLE = '''
import torch
import furiosa.torch as ft
from torch_rbln._internal import secret

class Runnable(Protocol):
    """furiosa.torch.ir.Runnable"""
    VENDOR: ClassVar = "furiosa.torch.ir.Runnable"
    binary: bytes
    def serialize(self) -> bytes: ...

class Ours(Protocol):
    def nothing(self) -> None: ...

def use() -> None:
    torch.rbln.synchronize(0)
    torch.empty(1)
    ft.ir.Runnable.deserialize(b"").binary
    secret()
'''


def rows() -> dict[str, list[str]]:
    """Name -> the other cells of its row."""
    found = {}
    for line in INVENTORY.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        match = re.fullmatch(r"`([\w.]+)`", cells[0])
        if match:
            assert match[1] not in found, f"{match[1]} is listed twice"
            found[match[1]] = cells[1:]
    return found


def pins() -> dict[str, str]:
    found = {}
    for path in ROOT.glob("requirements*.txt"):
        for line in path.read_text().splitlines():
            name, separator, version = line.partition("==")
            if separator and (name != "torch" or path.name == "requirements.txt"):
                found[name] = version
    return found


def test_names_are_found_in_code_and_in_marked_protocols() -> None:
    assert names_in(SAMPLE) == {
        "furiosa.torch",
        "furiosa.torch.ir.Runnable.deserialize",
        "furiosa.torch.ir.Runnable.binary",
        "furiosa.torch.ir.Runnable.serialize",
        "torch_rbln._internal.secret",
        "torch.rbln.synchronize",
    }
    assert is_private("torch_rbln._internal.secret")


def test_the_inventory_is_what_the_code_uses() -> None:
    used, listed = vendor_names(BINDINGS), rows()
    assert sorted(used) == sorted(listed), "docs/vendor-private-api.md and the code differ"
    for name, cells in listed.items():
        version, where, why, instead = cells
        pinned = pins().get(distribution_of(name))
        assert pinned is None or version == pinned.partition("+")[0], f"{name}: {version}, but {pinned} is pinned"
        assert {f"`{path}`" for path in used[name]} == set(where.split(", ")), f"{name}: used in {used[name]}"
        assert why, f"{name}: why is it used?"
        assert bool(instead) == is_private(name), f"{name}: a private name, and only that, needs the last column"


# Folders that know no vendor are left out.
DRIVERS = [path for path in sorted(BINDINGS.rglob("*.py")) if path.parent.name not in {"checkpoint", "cpu", "model"}]


@pytest.mark.parametrize("path", DRIVERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_name_is_made_up_at_run_time(path: Path) -> None:
    """What getattr or importlib reach cannot be listed."""
    text = path.read_text()
    assert not re.search(r"\b(getattr|setattr|import_module|__import__)\(", text), f"{path} hides names"
