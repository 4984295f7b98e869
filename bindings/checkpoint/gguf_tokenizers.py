"""The tokenizer of a GGUF file, as the files of a Hugging Face checkpoint.

A GGUF holds the vocabulary, and for a byte-level BPE its merges. For a sentencepiece BPE it has scores instead: a piece
of a higher score is made first. They follow the order of the vocabulary, except that tokens a user defined have none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from rowlock.bindings.checkpoint.errors import CheckpointError, CheckpointFault

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Kinds of tokens in ``tokenizer.ggml.token_type``."""
_SMOLLM_SPLIT: Final = ("smollm", "smollm2")
_SPACE: Final = "\u2581"
_BYTE_LEVEL: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_ROLES: Final = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))


def write_tokenizer(source: Path, directory: Path, fields: Mapping[str, Any]) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    Raises:
        CheckpointError: UNSUPPORTED, naming the kind of tokenizer.

    """
    _write(directory / "tokenizer.json", _tokenizer(source, fields))
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {
        role: fields[f"tokenizer.ggml.{key}_token_id"]
        for role, key in _ROLES
        if fields.get(f"tokenizer.ggml.{key}_token_id") is not None
    }
    template = fields.get("tokenizer.chat_template")
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
            "clean_up_tokenization_spaces": False,
            **{f"{role}_token": tokens[token] for role, token in ids.items()},
            **({"chat_template": template} if template else {}),
        },
    )
    ends = {f"{role}_token_id": ids[role] for role in ("bos", "eos") if role in ids}
    _write(directory / "generation_config.json", ends)


def _tokenizer(source: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind == "gpt2" and split in _SMOLLM_SPLIT:
        return _byte_level(fields)
    if kind == "llama" and fields.get("general.architecture") == "gemma3" and _plain(fields):
        return _sentencepiece(source, fields)
    raise CheckpointError(
        CheckpointFault.UNSUPPORTED,
        source,
        f"tokenizer {kind!r}/{split!r}",
        "only the tokenizers of SmolLM and of Gemma 3 convert",
    )


def _plain(fields: Mapping[str, Any]) -> bool:
    """Whether a text is only given its first token: no space before it, nothing behind it."""
    added = {"bos_token": True, "eos_token": False, "space_prefix": False}
    return all(fields.get(f"tokenizer.ggml.add_{what}", wanted) == wanted for what, wanted in added.items())


def _byte_level(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **_common(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"], special=(_CONTROL,)),
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
        },
        "decoder": _BYTE_LEVEL,
        "model": _bpe(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]),
    }


def _sentencepiece(source: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Runs of spaces are defined by the user, but are ordinary pieces here: texts have them only once normalised."""
    given, kinds, first = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "bos_token_id"))
    scores = [score for score, kind in zip(fields["tokenizer.ggml.scores"], kinds, strict=True) if kind == _NORMAL]
    if any(later > earlier for earlier, later in pairwise(scores)):
        raise CheckpointError(
            CheckpointFault.UNSUPPORTED, source, "a vocabulary that is not in the order of its scores"
        )
    runs = {token for token, kind in zip(given, kinds, strict=True) if kind == _USER_DEFINED and not token.strip(" ")}
    tokens = [token.replace(" ", _SPACE) if token in runs else token for token in given]
    kinds = [_NORMAL if token in runs else kind for token, kind in zip(given, kinds, strict=True)]
    start, other = ({"SpecialToken": {"id": tokens[first], "type_id": kind}} for kind in (0, 1))
    return {
        **_common(tokens, kinds, special=(_CONTROL, _USER_DEFINED)),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE},
        "pre_tokenizer": {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}, other, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {tokens[first]: {"id": tokens[first], "ids": [first], "tokens": [tokens[first]]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            **_bpe(tokens, merges_of(tokens)),
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }  # fmt: skip


def _common(tokens: list[str], kinds: list[int], special: tuple[int, ...]) -> dict[str, Any]:
    """The parts that every tokenizer has; tokens of some kinds are never split, and control tokens not printed."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": tokens[index], **flags, "special": kind == _CONTROL}
            for index, kind in enumerate(kinds)
            if kind in special
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
    }


def _bpe(tokens: list[str], merges: list[str] | list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": merges,
    }


def merges_of(tokens: list[str]) -> list[list[str]]:
    """Merges that make the pieces of a vocabulary in its order: each way to cut a piece in two is one of them."""
    known = set(tokens)
    return [
        [token[:at], token[at:]]
        for token in tokens
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in known and token[at:] in known
    ]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
