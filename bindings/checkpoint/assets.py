"""Tokenizer, chat template and generation config: what turns text into tokens and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from blake3 import blake3

from rowlock.bindings.checkpoint.files import Folder

ASSET_FILES: Final = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Files of a checkpoint directory that are part of its identity, in name order."""
ASSET_BYTES_MAX: Final = 256 * 1024 * 1024


@dataclass(frozen=True)
class Assets:
    """The asset files of a checkpoint, read once into memory.

    Attributes:
        files: content by file name; only names in :data:`ASSET_FILES`.

    """

    files: dict[str, bytes]

    @cached_property
    def digest(self) -> str:
        """BLAKE3-256 over (name, content digest) of each file in name order, hex."""
        hasher = blake3(derive_key_context="rowlock v1 assets")
        for name in sorted(self.files):
            hasher.update(name.encode() + b"\0" + blake3(self.files[name]).digest())
        return hasher.hexdigest()


def read_assets(folder: Folder) -> Assets:
    """The asset files of a directory; those that are absent are left out.

    Raises:
        CheckpointError: UNREADABLE, or MALFORMED when a file is absurdly large.

    """
    files = {}
    for name in ASSET_FILES:
        file = folder.open(name)
        if file is not None:
            try:
                files[name] = file.read(ASSET_BYTES_MAX)
            finally:
                file.close()
    return Assets(files)
