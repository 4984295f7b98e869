"""Built programs in files: found by content, believed only with their digest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.checkpoints import TINY

from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.config import parse_config
from rowlock.bindings.model.layout import build_layout
from rowlock.bindings.rngd.artifacts import ArtifactStore
from rowlock.bindings.rngd.builder import Builder
from rowlock.bindings.rngd.shape import ProgramSet

KEY, OTHER = "aa" * 32, "bb" * 32


def test_what_was_kept_is_found_again(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "programs")
    assert store.find(KEY) is None
    store.put(KEY, b"program")
    store.put(OTHER, b"other")
    found, other = ArtifactStore(tmp_path / "programs").find(KEY), store.find(OTHER)
    assert found is not None
    assert other is not None
    assert (found.data, other.data) == (b"program", b"other")
    assert found.digest != other.digest
    assert sorted(path.name for path in store.directory.iterdir()) == [f"{KEY}.program", f"{OTHER}.program"]


@pytest.mark.parametrize("damage", [b"", b"\0" * 31, b"\0" * 64])
def test_a_damaged_file_is_not_there(tmp_path: Path, damage: bytes) -> None:
    store = ArtifactStore(tmp_path)
    store.put(KEY, b"program")
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage)
    assert store.find(KEY) is None


@pytest.mark.parametrize("bit", range(0, 8 * 39, 13))
def test_no_flipped_bit_is_believed(tmp_path: Path, bit: int) -> None:
    store = ArtifactStore(tmp_path)
    store.put(KEY, b"program")
    (path,) = tmp_path.iterdir()
    wrong = bytearray(path.read_bytes())
    wrong[bit // 8] ^= 1 << bit % 8
    path.write_bytes(wrong)
    assert store.find(KEY) is None


WANTED = ProgramSet.of(parse_config(Path(), TINY), build_layout(parse_config(Path(), TINY), "BF16"), ())


def test_a_builder_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    code = "import os, sys; print('thread panicked', file=sys.stderr, flush=True); os.abort()"
    builder = Builder(tmp_path, "reference", [sys.executable, "-c", code])
    with pytest.raises(DeviceError, match="was ended by SIGABRT: thread panicked") as caught:
        builder.build(WANTED)
    assert caught.value.fault is DeviceFault.UNSUPPORTED


def test_a_builder_is_asked_for_programs_and_says_what_it_built(tmp_path: Path) -> None:
    code = (
        "import json, sys; assert sys.argv[2:] == ['reference'], sys.argv; json.load(sys.stdin)['model']['config'];"
        "print('noise'); print('built: a'); print('built: b')"
    )
    assert Builder(tmp_path, "reference", [sys.executable, "-c", code]).build(WANTED) == 2


def test_a_builder_that_is_given_up_ends_its_child(tmp_path: Path) -> None:
    """Whoever stops an owner does not wait for minutes of a compiler."""
    begun = tmp_path / "begun"
    code = (
        "import os, sys, threading, pathlib; sys.stdin.read();"
        f"pathlib.Path({str(begun)!r}).write_text(str(os.getpid())); threading.Event().wait()"
    )
    with pytest.raises(DeviceError, match="was given up"):
        Builder(tmp_path, "reference", [sys.executable, "-c", code]).build(WANTED, begun.exists)
    assert not Path(f"/proc/{begun.read_text()}").exists()
