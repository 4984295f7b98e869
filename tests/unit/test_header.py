"""The strict safetensors parser: what two readers could understand differently is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.files import Folder
from rowlock.bindings.checkpoint.header import Extent, read_header

UNICODE = ("caf\u00e9", "cafe\u0301")  # one name in two Unicode forms


def read(path: Path) -> list[Extent]:
    folder = Folder(path.parent)
    file = folder.open(path.name)
    assert file is not None
    try:
        return read_header(file)
    finally:
        file.close()
        folder.close()


def raw_file(path: Path, header: bytes, data: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def entry(begin: int, end: int, dtype: str = "U8", shape: list[object] | None = None) -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def encoded(**entries: object) -> bytes:
    return json.dumps(entries).encode()


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    save_file(
        {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.zeros((0, 4), np.uint8)}, tmp_path / "m.safetensors"
    )
    found = {item.tensor.name: item for item in read(tmp_path / "m.safetensors")}
    assert (found["b"].tensor.dtype, found["b"].tensor.shape) == ("F32", (2, 3))
    data = (tmp_path / "m.safetensors").read_bytes()[found["b"].offset :][:24]
    assert np.frombuffer(data, np.float32).tolist() == [0, 1, 2, 3, 4, 5]
    assert found["a"].tensor.nbytes == 0


@pytest.mark.parametrize(
    ("header", "data", "fault", "says"),
    [
        (encoded(a=entry(0, 4)), b"123", CheckpointFault.MALFORMED, "truncated"),
        (encoded(a=entry(0, 4)), b"12345", CheckpointFault.MALFORMED, "bytes after the last tensor"),
        (encoded(a=entry(0, 4), b=entry(5, 8)), b"x" * 8, CheckpointFault.MALFORMED, "hole"),
        (encoded(a=entry(1, 4)), b"x" * 4, CheckpointFault.MALFORMED, "hole"),
        (encoded(a=entry(0, 4), b=entry(3, 8)), b"x" * 8, CheckpointFault.MALFORMED, "overlaps"),
        (encoded(a=entry(4, 0, shape=[4])), b"", CheckpointFault.MALFORMED, "data_offsets"),
        (encoded(a=entry(0, 4, "F32", [2])), b"x" * 4, CheckpointFault.MALFORMED, "8 bytes"),
        (encoded(a=entry(0, 4, "F31", [1])), b"x" * 4, CheckpointFault.DTYPE, "'F31'"),
        (encoded(a=entry(0, 4, shape=[-4])), b"x" * 4, CheckpointFault.MALFORMED, "shape"),
        (encoded(a=entry(0, 4, shape=[True, 4])), b"x" * 4, CheckpointFault.MALFORMED, "shape"),
        (encoded(a=entry(0, 4, shape=[4.0])), b"x" * 4, CheckpointFault.MALFORMED, "shape"),
        (encoded(a=entry(0, 0, shape=[2**62, 2**62, 0])), b"", CheckpointFault.MALFORMED, "shape"),
        (encoded(a={**entry(0, 4), "extra": 1}), b"x" * 4, CheckpointFault.MALFORMED, "exactly"),
        (encoded(a=[1]), b"", CheckpointFault.MALFORMED, "exactly"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
         b"xx", CheckpointFault.DUPLICATE, "'a'"),
        (b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x",
         CheckpointFault.DUPLICATE, "'dtype'"),
        (b'{"a":{"dtype":"U8","shape":[1e999],"data_offsets":[0,1]}}', b"x", CheckpointFault.MALFORMED, "too large"),
        (encoded(**{"n" * 600: entry(0, 1)}), b"x", CheckpointFault.MALFORMED, "600 characters"),
        (b" " + encoded(a=entry(0, 1)), b"x", CheckpointFault.MALFORMED, "begin with"),
        (encoded(a=entry(0, 1)) + b"x", b"x", CheckpointFault.MALFORMED, "JSON"),
        (b"{" * 100_000, b"", CheckpointFault.MALFORMED, "JSON"),
        (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,1]}}', b"x", CheckpointFault.MALFORMED, "NaN"),
        (b"\xff\xfe{}", b"", CheckpointFault.MALFORMED, "begin with"),
        (b'{"\xff":1}', b"", CheckpointFault.MALFORMED, "JSON"),
        (encoded(__metadata__={"n": 1}), b"", CheckpointFault.MALFORMED, "__metadata__"),
        (json.dumps({UNICODE[0]: entry(0, 1), UNICODE[1]: entry(1, 2)}).encode(), b"xx",
         CheckpointFault.DUPLICATE, "Unicode"),
    ],
)  # fmt: skip
def test_refuses(tmp_path: Path, header: bytes, data: bytes, fault: CheckpointFault, says: str) -> None:
    path = raw_file(tmp_path / "m.safetensors", header, data)
    with pytest.raises(CheckpointError, match=says) as caught:
        read(path)
    assert caught.value.fault is fault
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 8, (100_000_001).to_bytes(8, "little") + b"{}"])
def test_refuses_impossible_header_lengths(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="does not fit"):
        read(path)


def test_refuses_a_header_over_the_limit_without_reading_it(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    with open(path, "wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(CheckpointError, match="over the limit"):
        read(path)


def test_trailing_blanks_of_the_header_are_padding(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "m.safetensors", encoded(a=entry(0, 1)) + b"   ", b"x")
    assert [item.tensor.name for item in read(path)] == ["a"]
