"""GGUF to a bf16 Hugging Face checkpoint.

The ``gguf`` package reads and dequantises; names and layout are mapped in :mod:`gguf_models`, and the tokenizer is
rebuilt from the GGUF's vocabulary in :mod:`gguf_tokenizers`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.gguf_models import Architecture, Values, architecture_of, model_config
from rowlock.bindings.checkpoint.gguf_tokenizers import write_tokenizer
from rowlock.bindings.checkpoint.tensors import TensorInfo
from rowlock.bindings.checkpoint.writer import write_safetensors


@dataclass(frozen=True)
class Conversion:
    """What a conversion wrote.

    Attributes:
        directory: the checkpoint.
        tensors: their number.
        nbytes: bytes of tensor data.

    """

    directory: Path
    tensors: int
    nbytes: int


def convert_gguf(source: Path, directory: Path, progress: Callable[[int, int], None]) -> Conversion:
    """Write a GGUF file as a bf16 checkpoint directory.

    The directory appears complete or not at all: it is written under a temporary name
    beside its place, synced, and renamed.

    Args:
        source: the GGUF file.
        directory: must not exist.
        progress: called with (bytes done, bytes in all) of tensor data.

    Raises:
        CheckpointError: not a GGUF, or one of an unsupported architecture or tokenizer.
        FileExistsError: the directory exists.

    """
    reader = _open(source)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    architecture = architecture_of(source, fields)
    if directory.exists():
        raise FileExistsError(directory)
    temporary = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        tensors = {architecture.name(source, tensor.name): tensor for tensor in reader.tensors}
        config = model_config(fields, tied="lm_head.weight" not in tensors)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tokenizer(source, temporary, fields)
        nbytes = _write_weights(temporary / "model.safetensors", tensors, architecture, fields, progress)
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return Conversion(directory, len(tensors), nbytes)


def _open(source: Path) -> Any:
    try:
        from gguf import GGUFReader  # noqa: PLC0415 - an optional dependency
    except ImportError as error:
        raise CheckpointError(
            CheckpointFault.UNSUPPORTED,
            source,
            "reading GGUF needs the 'gguf' package",
            "pip install 'rowlock[convert]'",
        ) from error
    try:
        return GGUFReader(source)
    except FileNotFoundError:
        raise CheckpointError(CheckpointFault.NOT_FOUND, source, "no such file") from None
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise CheckpointError(CheckpointFault.MALFORMED, source, f"not a GGUF file: {error}") from error


def _write_weights(
    path: Path,
    tensors: dict[str, Any],
    architecture: Architecture,
    fields: dict[str, Any],
    progress: Callable[[int, int], None],
) -> int:
    """Stream the tensors, one at a time in memory, in name order; their bytes in all."""
    infos = [
        TensorInfo(name, "BF16", tuple(int(size) for size in reversed(tensors[name].shape))) for name in sorted(tensors)
    ]
    total = sum(info.nbytes for info in infos)

    def data() -> Iterator[bytes]:
        done = 0
        for info in infos:
            values = _dequantised(info, tensors[info.name])
            yield to_bf16(architecture.restore(info.name, values, fields)).tobytes()
            done += info.nbytes
            progress(done, total)

    write_safetensors(path, infos, data(), {"format": "pt"})
    return total


def _dequantised(info: TensorInfo, tensor: Any) -> Values:
    from gguf import dequantize  # noqa: PLC0415 - an optional dependency

    values: Values = dequantize(tensor.data, tensor.tensor_type).reshape(info.shape)
    return values


def to_bf16(values: Values) -> npt.NDArray[np.uint16]:
    """Round float32 to bfloat16 bits, ties to even; NaN stays NaN (quieted)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")
