"""What a machine has for an owner, and what it lacks: looked at without changing anything."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rowlock.bindings.device import DeviceError
from rowlock.bindings.finding import Finding
from rowlock.daemon.devices import lock_device, open_binding
from rowlock.daemon.environments import DeviceRefusedError
from rowlock.daemon.lock import DeviceLockedError, refuse_foreign_state, runtime_directory
from rowlock.daemon.probing import probe_device
from rowlock.daemon.settings import Settings
from rowlock.journal.journal import FILE_NAME, Journal
from rowlock.journal.journal_file import JournalError

PACKAGES = ("torch", "grpcio", "protobuf", "blake3", "sqlite-utils", "tokenizers", "numpy")
STATE_FREE_MIN = 1024**3


def examine(settings: Settings) -> Iterator[Finding]:
    """Everything that `rowlock serve` with these settings depends on."""
    yield Finding("python", sys.version_info >= (3, 11), sys.version.split()[0])
    yield Finding("sqlite", sqlite3.sqlite_version_info >= (3, 37), sqlite3.sqlite_version)
    for package in PACKAGES:
        yield _package(package)
    yield from _device(settings)
    yield _lock(settings)
    yield _state(settings)
    yield _journal(settings)
    if settings.checkpoint is not None:
        there = (settings.checkpoint / "config.json").is_file()
        yield Finding("checkpoint", there, f"{settings.checkpoint}{'' if there else ': has no config.json'}")


def _package(name: str) -> Finding:
    try:
        return Finding(name, True, version(name))
    except PackageNotFoundError:
        return Finding(name, False, "not installed: pip install 'rowlock[daemon]'")


def _device(settings: Settings) -> Iterator[Finding]:
    """From the driver up, in a process of its own; opened here only where nothing can abort this one."""
    try:
        found = probe_device(settings.device, settings.without_hardware)
        yield from found or [_opened(settings)]
    except DeviceRefusedError as error:
        yield Finding("device", False, str(error))


def _opened(settings: Settings) -> Finding:
    try:
        binding = open_binding(settings)
        try:
            binding.memory.probe()
            facts = binding.facts
            return Finding("device", True, f"{facts.device}: {facts.execution}, readback proves {facts.readback}")
        finally:
            binding.close()
    except DeviceError as error:
        return Finding("device", False, str(error))


def _lock(settings: Settings) -> Finding:
    try:
        lock_device(settings.device).release()
        return Finding("lock", True, f"free, in {runtime_directory()}")
    except (DeviceRefusedError, DeviceLockedError, OSError) as error:
        return Finding("lock", False, str(error))


def _state(settings: Settings) -> Finding:
    place = next(path for path in (settings.state, *settings.state.parents) if path.exists())
    free = shutil.disk_usage(place).free
    try:
        refuse_foreign_state(place)
    except OSError as error:
        return Finding("state", False, str(error))
    if not os.access(place, os.W_OK):
        return Finding("state", False, f"{place} cannot be written to")
    enough = free >= STATE_FREE_MIN
    return Finding("state", enough, f"{settings.state}, {free / 1e9:.1f} GB free" + ("" if enough else ": too little"))


def _journal(settings: Settings) -> Finding:
    if not (settings.state / FILE_NAME).exists():
        return Finding("journal", True, "none yet")
    try:
        journal = Journal(settings.state, settings.device, read_only=True)
    except JournalError as error:
        return Finding("journal", False, str(error))
    try:
        quarantine, current = journal.quarantine(), journal.current()
    finally:
        journal.close()
    if quarantine:
        return Finding("journal", False, f"quarantined: {quarantine}")
    where = f"generation {current.generation} from {current.checkpoint}" if current else "nothing published yet"
    there = current is None or Path(current.checkpoint).is_dir()
    return Finding("journal", there, where + ("" if there else ": that directory is gone"))
