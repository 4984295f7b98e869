"""The names of vendors' packages that a source file uses, found without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

# Distribution -> the module names that are its own, however they are reached.
VENDORS = {
    "furiosa-torch": ("furiosa.torch", "torch.furiosa"),
    "furiosa-smi": ("furiosa_smi",),
    "torch-rbln": ("torch_rbln", "torch.rbln"),
    "rebel-compiler": ("rebel",),
    "torch": ("torch.cuda",),  # and whatever is private in torch
}
PROTOCOL_MARK = "VENDOR"


def names_in(source: str) -> set[str]:
    """Dotted vendor names: attribute chains from imported modules, and members of marked protocols."""
    tree = ast.parse(source)
    aliases = dict(_aliases(tree))
    found = set(_chains(tree, aliases))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found |= set(_members(node))
    return {name for name in found if distribution_of(name)}


def distribution_of(name: str) -> str:
    """Whose name it is, or empty."""
    for distribution, prefixes in VENDORS.items():
        if any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes):
            return distribution
    return "torch" if name.startswith("torch.") and is_private(name) else ""


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def vendor_names(root: Path) -> dict[str, set[str]]:
    """Vendor name -> files below ``root`` that use it."""
    found: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.py")):
        for name in names_in(path.read_text()):
            found.setdefault(name, set()).add(str(path.relative_to(root.parent)))
    return found


def _aliases(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What each imported name stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield (item.asname, item.name) if item.asname else (item.name.split(".")[0], item.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            for item in node.names:
                yield item.asname or item.name, f"{node.module}.{item.name}"


def _chains(node: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """The longest dotted names that start at an import; an import itself is one."""
    if isinstance(node, ast.Import):
        yield from (item.name for item in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{item.name}" for item in node.names)
    parts: list[str] = []
    inner = node
    while isinstance(inner, ast.Attribute):
        parts.append(inner.attr)
        inner = inner.value
    if parts and isinstance(inner, ast.Name) and inner.id in aliases:
        yield ".".join([aliases[inner.id], *reversed(parts)])
        return
    for child in ast.iter_child_nodes(inner):
        yield from _chains(child, aliases)


def _members(node: ast.ClassDef) -> Iterator[str]:
    """The members of a protocol that is marked as describing a vendor's class."""
    marks = [
        item.value.value
        for item in node.body
        if isinstance(item, ast.Assign | ast.AnnAssign)
        and isinstance(item.value, ast.Constant)
        and _target(item) == PROTOCOL_MARK
    ]
    for mark in marks:
        for item in node.body:
            name = item.name if isinstance(item, ast.FunctionDef) else _target(item)
            if name and name != PROTOCOL_MARK:
                yield f"{mark}.{name}"


def _target(item: ast.stmt) -> str:
    target = (
        item.target if isinstance(item, ast.AnnAssign) else item.targets[0] if isinstance(item, ast.Assign) else None
    )
    return target.id if isinstance(target, ast.Name) else ""
