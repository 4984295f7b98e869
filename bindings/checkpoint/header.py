"""The header of a safetensors file, parsed strictly.

Format: 8 bytes little-endian header length, a JSON object, then the tensor bytes
(https://github.com/huggingface/safetensors#format). What that text leaves open is
refused here: a header that two readers could understand differently is no basis for
an identity.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from rowlock.bindings.checkpoint.dtypes import ITEM_BYTES
from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.files import OpenFile
from rowlock.bindings.checkpoint.tensors import TensorInfo

HEADER_BYTES_MAX: Final = 100_000_000
"""The limit of the reference reader."""
DIMENSION_MAX: Final = 2**40
"""No dimension of a real tensor comes near; it bounds the products below."""
RANK_MAX: Final = 8
NAME_LENGTH_MAX: Final = 512
FILE_FIX: Final = "write the file again with the safetensors library"


class _DuplicateKeyError(ValueError):
    pass


@dataclass(frozen=True)
class Extent:
    """Where one tensor's bytes lie: ``offset`` from the start of ``path``, in bytes."""

    tensor: TensorInfo
    path: Path
    offset: int


def parse_json_strictly(raw: bytes) -> Any:
    """JSON in which no object names a key twice and every number is finite.

    Raises:
        ValueError: when it is not such JSON (with the duplicate key, if that is why).

    """

    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise _DuplicateKeyError(f"the key {key!r} stands twice in one object")
            result[key] = value
        return result

    def no_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def finite(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"{digits[:40]} is too large")
        return value

    try:
        text = raw.decode("utf-8")
        return json.loads(text, object_pairs_hook=no_duplicates, parse_constant=no_constant, parse_float=finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_header(file: OpenFile) -> list[Extent]:
    """The tensors of one safetensors file, in the order of their bytes.

    Raises:
        CheckpointError: when anything in it is not exactly as the format wants it
            (MALFORMED, DUPLICATE, DTYPE).

    """
    size = file.stamp.size
    length = int.from_bytes(file.read_at(0, 8), "little") if size >= 8 else size
    if length > size - 8:
        raise _malformed(file.path, f"header of {length} bytes does not fit a file of {size} bytes")
    if length > HEADER_BYTES_MAX:
        raise _malformed(file.path, f"header of {length} bytes is over the limit of {HEADER_BYTES_MAX}")
    return _parse(file.path, file.read_at(8, length), start=8 + length, size=size)


def parse_file(path: Path, data: bytes) -> tuple[dict[str, str], dict[str, bytes]]:
    """Metadata and the bytes of each tensor of a small safetensors file held in memory.

    Args:
        path: for error messages.
        data: the whole file.

    Raises:
        CheckpointError: as :func:`read_header`.

    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(len(data) - 8, HEADER_BYTES_MAX):
        raise _malformed(path, f"header of {length} bytes does not fit a file of {len(data)} bytes")
    raw = data[8 : 8 + length]
    extents = _parse(path, raw, start=8 + length, size=len(data))
    tensors = {item.tensor.name: data[item.offset : item.offset + item.tensor.nbytes] for item in extents}
    return parse_json_strictly(raw).get("__metadata__", {}), tensors


def build_header(tensors: list[TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and header of a file that holds these tensors in this order."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for info in tensors:
        header[info.name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [position, position + info.nbytes],
        }
        position += info.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def _malformed(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(CheckpointFault.MALFORMED, path, problem, FILE_FIX)


def _parse(path: Path, raw: bytes, start: int, size: int) -> list[Extent]:
    if not raw.startswith(b"{"):
        raise _malformed(path, "the header does not begin with '{'")
    try:
        header = parse_json_strictly(raw)
    except _DuplicateKeyError as error:
        raise CheckpointError(CheckpointFault.DUPLICATE, path, f"header: {error}", FILE_FIX) from None
    except ValueError as error:
        raise _malformed(path, f"header is not valid JSON: {error}") from None
    _check_metadata(path, header.pop("__metadata__", {}))
    extents = sorted(_entries(path, header, start), key=lambda extent: (extent.offset, extent.tensor.nbytes))
    _check_tiling(path, extents, start, size)
    _check_unicode(path, extents)
    return extents


def _check_metadata(path: Path, metadata: Any) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _malformed(path, "__metadata__ is not a map of strings")


def _entries(path: Path, header: dict[str, Any], start: int) -> Iterator[Extent]:
    for name, entry in header.items():
        if len(name) > NAME_LENGTH_MAX:
            raise _malformed(path, f"a tensor name of {len(name)} characters ({name[:40]}...)")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise _malformed(path, f"tensor {name!r} must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            raise CheckpointError(CheckpointFault.DTYPE, path, f"tensor {name!r} has the unknown dtype {dtype!r}")
        if not _is_sizes(shape) or len(shape) > RANK_MAX or max(shape, default=0) > DIMENSION_MAX:
            raise _malformed(path, f"tensor {name!r} has an impossible shape {str(shape)[:80]}")
        if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise _malformed(path, f"tensor {name!r} has impossible data_offsets {str(offsets)[:80]}")
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        if nbytes != offsets[1] - offsets[0]:
            raise _malformed(
                path,
                f"tensor {name!r}: {dtype} {shape} is {nbytes} bytes, its data_offsets span {offsets[1] - offsets[0]}",
            )
        yield Extent(TensorInfo(name, dtype, tuple(shape)), path, start + offsets[0])


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_tiling(path: Path, extents: list[Extent], start: int, size: int) -> None:
    position = start
    for extent in extents:
        if extent.offset != position:
            kind = "overlaps the tensor before it" if extent.offset < position else "leaves a hole before it"
            raise _malformed(path, f"tensor {extent.tensor.name!r} {kind} (at byte {extent.offset - start})")
        position += extent.tensor.nbytes
    if position != size:
        problem = "is truncated" if position > size else "has bytes after the last tensor"
        raise _malformed(path, f"{problem}: the header describes {position} bytes, the file has {size}")


def _check_unicode(path: Path, extents: list[Extent]) -> None:
    seen: dict[str, str] = {}
    for extent in extents:
        name = extent.tensor.name
        other = seen.setdefault(unicodedata.normalize("NFKC", name), name)
        if other != name:
            raise CheckpointError(
                CheckpointFault.DUPLICATE, path, f"{name!r} and {other!r} differ only by their Unicode form"
            )
