"""Who may import whom: the structure, as a test."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src" / "rowlock"

# A module may import only from the areas listed for the longest prefix of its name.
ALLOWED = {
    "v1": {"v1"},
    "bindings.checkpoint": {"bindings.checkpoint"},
    "bindings": {"bindings"},
    "journal": {"journal"},
    "daemon.owner": {"daemon.owner", "bindings", "journal", "v1"},
    "daemon.answering": {"daemon.answering", "daemon.owner", "bindings", "v1"},
    "daemon.http": {"daemon.http", "daemon.answering", "daemon.settings", "daemon.owner", "bindings", "v1"},
    "daemon.api": {"daemon.api", "daemon.answering", "daemon.settings", "daemon.owner", "bindings", "journal", "v1"},
    "daemon.staging": {"daemon.staging", "daemon.pacing", "daemon.owner", "bindings", "v1"},
    "daemon.prefill": {"daemon.prefill", "daemon.owner", "bindings", "v1"},
    # what a source for another device needs: the standard library, and for its engine numpy
    "daemon.prefill.protocol": {"daemon.prefill.protocol"},
    "daemon": {"daemon", "bindings", "journal", "v1"},
    # what a client needs to check a history itself: no sqlite-utils among it
    "cli": {"cli", "bindings.checkpoint", "journal.audit", "journal.chain", "journal.chain_table", "v1"},
}
# The commands that reach into the daemon, inside their functions.
EXCEPTIONS = {
    "cli.serve": {"daemon", "journal", "bindings.device"},
    "cli.doctor": {"daemon"},
    "cli.prepare": {"daemon", "bindings.device"},
    "cli.prefill_worker": {"daemon.prefill", "bindings.children"},
}
# Vendor packages, each with the one file that may import it.
VENDOR_PACKAGES = {
    "furiosa": {"bindings.rngd.sdk"},
    "furiosa_smi": {"bindings.rngd.sdk"},
    "torch_rbln": {"bindings.atom.sdk"},
    "rebel": {"bindings.atom.rebel_sdk"},
}
TORCH_AREAS = {
    "bindings.atom",
    "bindings.cpu",
    "bindings.cuda",
    "bindings.faults",
    "bindings.memory",
    "bindings.model.attention",
    "bindings.model.cache",
    "bindings.model.decoder",
    "bindings.model.generation",
    "bindings.model.importing",
    "bindings.model.runtime",
    "bindings.rngd",
    "bindings.vendor_errors",
    "bindings.weights",
    "daemon.prefill.decoder_engine",
}


def modules() -> dict[str, Path]:
    found = {}
    for area in ("v1", "bindings", "journal", "daemon", "cli"):
        for path in sorted((SRC / area).rglob("*.py")):
            if "_pb2" not in path.name:
                parts = [area, *path.relative_to(SRC / area).with_suffix("").parts]
                found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, areas: set[str]) -> bool:
    return any(name == area or name.startswith(area + ".") for area in areas)


@pytest.mark.parametrize("module", modules())
def test_imports_point_the_right_way(module: str) -> None:
    area = max((item for item in ALLOWED if within(module, {item})), key=len)
    allowed = ALLOWED[area] | EXCEPTIONS.get(module, set())
    for name in imports(modules()[module]):
        if name.startswith("rowlock."):
            inner = name.removeprefix("rowlock.")
            assert within(inner, allowed) or inner == "__version__", f"{module} imports {name}"


@pytest.mark.parametrize("module", modules())
def test_torch_and_vendors_stay_in_their_files(module: str) -> None:
    packages = {name.split(".")[0] for name in imports(modules()[module])}
    if "torch" in packages:
        assert within(module, TORCH_AREAS), f"{module} imports torch"
    for vendor, places in VENDOR_PACKAGES.items():
        assert vendor not in packages or module in places, f"{module} imports {vendor}"


def test_the_client_needs_no_torch() -> None:
    code = (
        "import sys, importlib\n"
        "from rowlock.cli.main import COMMANDS\n"
        "for name in COMMANDS: importlib.import_module(f'rowlock.cli.{name}'.replace('-', '_'))\n"
        "heavy = {'torch', 'transformers', 'sqlite_utils', 'tokenizers', 'structlog', 'gguf'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
