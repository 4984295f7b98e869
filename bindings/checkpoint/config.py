"""``config.json``: read strictly, and reduced to what makes two programs differ."""

from __future__ import annotations

import json
from typing import Any, Final

from blake3 import blake3

from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault
from rowlock.bindings.checkpoint.files import Folder
from rowlock.bindings.checkpoint.header import parse_json_strictly

COSMETIC_KEYS: Final = frozenset(
    {
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
"""Keys that do not change what is computed. dtype is in the tensors; model_type names the program."""
CONFIG_BYTES_MAX: Final = 4 * 1024 * 1024


def read_config(folder: Folder) -> dict[str, Any]:
    """The parsed ``config.json`` of a checkpoint directory.

    Raises:
        CheckpointError: NOT_FOUND, UNREADABLE, MALFORMED.

    """
    path = folder.path / "config.json"
    file = folder.open("config.json")
    if file is None:
        raise CheckpointError(
            CheckpointFault.NOT_FOUND, path, "no such file", "give a Hugging Face checkpoint directory"
        )
    try:
        config = parse_json_strictly(file.read(CONFIG_BYTES_MAX))
    except ValueError as error:
        raise CheckpointError(CheckpointFault.MALFORMED, path, f"is not valid JSON: {error}") from None
    finally:
        file.close()
    if not isinstance(config, dict):
        raise CheckpointError(CheckpointFault.MALFORMED, path, "is not a JSON object")
    return config


def program_digest(config: dict[str, Any], artifacts: tuple[bytes, ...] = ()) -> str:
    """BLAKE3-256, hex, over the canonical config and the digests of compiled artifacts.

    Canonical: without :data:`COSMETIC_KEYS`, keys sorted, no spaces, UTF-8.
    """
    kept = {key: value for key, value in config.items() if key not in COSMETIC_KEYS}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    hasher = blake3(derive_key_context="rowlock v1 program")
    hasher.update(canonical.encode())
    for artifact in artifacts:
        hasher.update(b"\0" + artifact)
    return hasher.hexdigest()


_TIED_BY_DEFAULT: Final = {"gemma3_text": True, "llama": False, "qwen3": False}


def tied_aliases(config: dict[str, Any]) -> dict[str, str]:
    """Checkpoint tensors that only repeat another one: alias -> original.

    ``tie_word_embeddings`` decides; where it is absent, the default of the family in
    transformers does. A value that is no boolean is refused where the config is parsed.
    """
    default = _TIED_BY_DEFAULT.get(str(config.get("model_type")), False)
    tied = config.get("tie_word_embeddings", default)
    return {"lm_head.weight": "model.embed_tokens.weight"} if tied is True else {}
