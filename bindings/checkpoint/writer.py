"""Writing safetensors files, one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from rowlock.bindings.checkpoint.header import build_header
from rowlock.bindings.checkpoint.tensors import TensorInfo


def write_safetensors(
    path: Path, tensors: Iterable[TensorInfo], data: Iterable[bytes], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file and sync it to disk.

    Args:
        path: must not exist.
        tensors: in the order in which ``data`` yields their bytes.
        data: the bytes of each tensor, consumed one at a time.
        metadata: the file's ``__metadata__``.

    """
    infos = list(tensors)
    with open(path, "xb") as file:
        file.write(build_header(infos, metadata))
        for info, content in zip(infos, data, strict=True):
            assert len(content) == info.nbytes, info.name
            file.write(content)
        file.flush()
        os.fsync(file.fileno())
