"""Identity: what a resident model is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from blake3 import blake3


@dataclass(frozen=True)
class Identity:
    """Program, assets and weights, each a BLAKE3-256 digest in hex."""

    program: str
    assets: str
    weights: str

    @cached_property
    def digest(self) -> str:
        """Digest of the three parts: the short name of the whole."""
        hasher = blake3(derive_key_context="rowlock v1 identity")
        for part in (self.program, self.assets, self.weights):
            hasher.update(bytes.fromhex(part))
        return hasher.hexdigest()
