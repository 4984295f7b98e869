"""Built programs, kept in files: content decides the name, and a digest proves what is read."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

CONTEXT: Final = "rowlock v1 program artifact"
SUFFIX: Final = ".program"
DIGEST_BYTES: Final = 32


@dataclass(frozen=True)
class Artifact:
    """A built program, as the vendor serialised it."""

    data: bytes

    @property
    def digest(self) -> str:
        """BLAKE3-256, hex."""
        return _digest(self.data).hex()


class ArtifactStore:
    """A directory of artifacts. A file is a digest and the bytes; one that does not agree counts as not there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def find(self, key: str) -> Artifact | None:
        """The artifact of this key, a hex digest of everything that it depends on."""
        data = _read(self._path(key))
        return None if data is None else Artifact(data)

    def put(self, key: str, data: bytes) -> None:
        """Keep an artifact: a reader sees all of it or none."""
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.directory, prefix=".", suffix=SUFFIX, delete=False) as file:
            try:
                file.write(_digest(data) + data)
                file.flush()
                os.fsync(file.fileno())
                Path(file.name).replace(self._path(key))
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{SUFFIX}"


def _read(path: Path) -> bytes | None:
    try:
        whole = path.read_bytes()
    except FileNotFoundError:
        return None
    data = whole[DIGEST_BYTES:]
    return data if whole[:DIGEST_BYTES] == _digest(data) else None


def _digest(data: bytes) -> bytes:
    return blake3(data, derive_key_context=CONTEXT).digest()
