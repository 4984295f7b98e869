"""Manifests: the group digests of a checkpoint, and the root over them.

Digests (all BLAKE3-256):

- group: plain BLAKE3 of its bytes;
- tensor: ``derive_key("rowlock v1 tensor")`` over dtype, name, shape and group digests,
  each variable part preceded by its length;
- root: ``derive_key("rowlock v1 weights")`` over the tensor digests in name order.
  A tensor that is only an alias of another (tied embeddings) is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from rowlock.bindings.checkpoint.dtypes import ITEM_BYTES
from rowlock.bindings.checkpoint.errors import CheckpointError
from rowlock.bindings.checkpoint.header import build_header, parse_file
from rowlock.bindings.checkpoint.stamps import FileStamp
from rowlock.bindings.checkpoint.tensors import TensorInfo

DIGEST_BYTES: Final = 32
FORMAT: Final = "rowlock manifest v1"


class ManifestError(ValueError):
    """A serialised manifest that is damaged or of another format."""


@dataclass(frozen=True)
class TensorManifest:
    """One tensor and the digests of its groups, concatenated.

    Attributes:
        info: name, dtype, shape.
        digests: ``info.groups * 32`` bytes.

    """

    info: TensorInfo
    digests: bytes

    def __post_init__(self) -> None:
        if len(self.digests) != self.info.groups * DIGEST_BYTES:
            raise ManifestError(f"{self.info.name}: {len(self.digests)} digest bytes for {self.info.groups} groups")

    @cached_property
    def digest(self) -> bytes:
        hasher = blake3(derive_key_context="rowlock v1 tensor")
        for part in (self.info.dtype.encode(), self.info.name.encode()):
            hasher.update(len(part).to_bytes(8, "little") + part)
        hasher.update(b"".join(size.to_bytes(8, "little") for size in (len(self.info.shape), *self.info.shape)))
        hasher.update(self.digests)
        return hasher.digest()

    def group(self, index: int) -> bytes:
        """Digest of one group, 32 bytes."""
        return self.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]

    def differing_groups(self, other: TensorManifest) -> list[int]:
        """Indices of the groups whose digests differ; both must have one shape and dtype."""
        assert self.info == other.info
        if self.digests == other.digests:
            return []
        rows = _digest_words(self.digests) != _digest_words(other.digests)
        indices: list[int] = np.flatnonzero(rows.any(axis=1)).tolist()
        return indices


def _digest_words(digests: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(digests, dtype=np.uint64).reshape(-1, DIGEST_BYTES // 8)


@dataclass(frozen=True)
class Manifest:
    """All tensors of a checkpoint, without aliases.

    Attributes:
        tensors: by name, in name order.

    """

    tensors: Mapping[str, TensorManifest]

    @classmethod
    def of(cls, tensors: Iterable[TensorManifest]) -> Self:
        return cls({tensor.info.name: tensor for tensor in sorted(tensors, key=lambda item: item.info.name)})

    @cached_property
    def root(self) -> str:
        """Weights root, hex."""
        hasher = blake3(derive_key_context="rowlock v1 weights")
        for name in sorted(self.tensors):
            hasher.update(self.tensors[name].digest)
        return hasher.hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(tensor.info.nbytes for tensor in self.tensors.values())

    @property
    def groups(self) -> int:
        return sum(tensor.info.groups for tensor in self.tensors.values())

    def serialise(self, stamps: Mapping[str, FileStamp] | None = None) -> bytes:
        """As a safetensors file: one U8 tensor ``[groups, 32]`` per tensor, the rest as metadata."""
        infos = [TensorInfo(name, "U8", (item.info.groups, DIGEST_BYTES)) for name, item in self.tensors.items()]
        metadata = {
            "format": FORMAT,
            "root": self.root,
            "tensors": json.dumps({name: [t.info.dtype, *t.info.shape] for name, t in self.tensors.items()}),
            "files": json.dumps({name: vars(stamp) for name, stamp in (stamps or {}).items()}),
        }
        return build_header(infos, metadata) + b"".join(item.digests for item in self.tensors.values())

    @classmethod
    def parse(cls, path: Path, data: bytes) -> tuple[Self, dict[str, FileStamp]]:
        """The manifest, and the stamps of the files that it was made from.

        Args:
            path: for error messages.
            data: what :meth:`serialise` returned.

        Raises:
            ManifestError: when the data is damaged, or its root is not that of its digests.

        """
        try:
            metadata, digests = parse_file(path, data)
            stamps = {name: FileStamp(**fields) for name, fields in json.loads(metadata["files"]).items()}
            infos = {name: _info(name, *fields) for name, fields in json.loads(metadata["tensors"]).items()}
            manifest = cls.of(TensorManifest(info, digests[name]) for name, info in infos.items())
        except (CheckpointError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{path}: not a manifest: {error}") from error
        if metadata.get("format") != FORMAT or metadata.get("root") != manifest.root:
            raise ManifestError(f"{path}: the manifest's root is not that of its digests")
        return manifest, stamps


def _info(name: str, dtype: str, *shape: int) -> TensorInfo:
    if dtype not in ITEM_BYTES or not all(type(size) is int and size >= 0 for size in shape):
        raise ManifestError(f"{name}: impossible dtype or shape")
    return TensorInfo(name, dtype, shape)
