"""Builds the stand-in for ATOM's runtime library, and talks to it. See tests/vendor/atom/standin/runtime.cpp."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from rowlock.bindings.atom.sdk import load
from rowlock.daemon.devices import select_device

SOURCES = Path(__file__).resolve().parents[1] / "vendor" / "atom" / "standin"
DOUBLE = SOURCES.parent / "double"
"""Put on the path of a process, the double of rebel-compiler takes the package's place there."""
LIBRARY = "librbln.so"
BUILT_UNDER = Path(__file__).resolve().parents[2] / ".cache" / "standin"
TOOLS = ("g++", "nm")


def wheel() -> Path | None:
    """The folder of the installed torch-rbln, which is not imported; None where there is none."""
    spec = importlib.util.find_spec("torch_rbln")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def build() -> Path:
    """The folder that holds the built library; built again only when a source or the wheel is another."""
    package = wheel()
    assert package is not None, "torch-rbln is not installed: make env-atom"
    libraries = sorted([*(package / "lib").glob("*.so"), *package.glob("*.so")])
    sources = sorted(SOURCES.iterdir())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*sources, *libraries, Path(__file__))))
    directory = BUILT_UNDER / digest.hexdigest()[:16]
    if not (directory / LIBRARY).exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        _compile(directory, [path for path in sources if path.suffix == ".cpp"], libraries)
    return directory


def environment(directory: Path) -> dict[str, str]:
    """Variables under which torch-rbln loads the stand-in and takes it for a device without an NPU."""
    return {"LD_LIBRARY_PATH": str(directory), "RBLN_DUMMY_DEVICE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


class StandIn:
    """The stand-in that this process has loaded."""

    def __init__(self, directory: Path) -> None:
        self._library = ctypes.CDLL(str(directory / LIBRARY), mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL)
        self._library.standin_take_log.restype = ctypes.c_uint64
        self._library.standin_take_log.argtypes = (ctypes.c_char_p, ctypes.c_uint64)
        self._library.standin_live_bytes.restype = ctypes.c_uint64

    @property
    def live_bytes(self) -> int:
        return int(self._library.standin_live_bytes())

    def take_log(self) -> list[str]:
        """The calls since the last time, in order."""
        out = ctypes.create_string_buffer(1 << 24)
        length = self._library.standin_take_log(out, len(out))
        assert length < len(out), "the log does not fit"
        return out.raw[:length].decode().splitlines()

    def watch_faults(self, path: Path) -> None:
        """Look for armed faults in this file from now on; nothing is armed while it does not exist."""
        self._library.standin_watch_faults(str(path).encode())


def python(code: str, cwd: Path) -> list[str]:
    """The lines that a fresh interpreter prints, which may load the stand-in."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        env={**os.environ, **environment(build()), "PYTHONPATH": str(SOURCES.parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@cache
def loaded() -> StandIn:
    """The stand-in, loaded into this process with torch-rbln over it: once, and for the life of the process."""
    directory = build()
    assert "torch_rbln" not in sys.modules, "torch-rbln is loaded already, over something else"
    os.environ.update(environment(directory))
    select_device("atom:1")
    load()
    return StandIn(directory)


def _compile(directory: Path, sources: list[Path], libraries: Iterable[Path]) -> None:
    objects = []
    for source in sources:
        objects.append(directory / f"{source.stem}.o")
        _run("g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-c", source, "-o", objects[-1])
    wanted = {name for name in _symbols("--undefined-only", libraries) if "rbln" in name.lower() or "rccl" in name}
    there = _symbols("--defined-only", libraries, dynamic=True) | _symbols("--defined-only", objects, dynamic=False)
    missing = directory / "missing.c"
    lines = ["#include <stdio.h>", "#include <stdlib.h>"]
    lines += [
        f'void {name}(void) {{ fputs("the stand-in has no {name}\\n", stderr); abort(); }}'
        for name in sorted(wanted - there)
    ]
    missing.write_text("\n".join(lines) + "\n")
    _run("gcc", "-fPIC", "-c", missing, "-o", directory / "missing.o")
    partial = directory / f"{LIBRARY}.partial"
    _run("g++", "-shared", f"-Wl,-soname,{LIBRARY}", *objects, directory / "missing.o", "-o", partial)
    partial.rename(directory / LIBRARY)


def _symbols(which: str, paths: Iterable[Path], *, dynamic: bool = True) -> set[str]:
    lines = _run("nm", *(["-D"] if dynamic else []), which, *paths).splitlines()
    return {line.split()[-1].partition("@")[0] for line in lines if line and not line.endswith(":")}


def _run(*command: object) -> str:
    done = subprocess.run([str(item) for item in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stderr}"
    return done.stdout


if __name__ == "__main__":  # for scripts/on-device.sh: the variables, for a shell to set
    for name, value in environment(build()).items():
        print(f"export {name}={value}")
