"""What a source says of itself, as JSON in its first frame."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from rowlock.daemon.prefill.protocol.frames import DIGEST_BYTES, TOKENS_MAX, FrameError, FrameFault, Hello
from rowlock.daemon.prefill.protocol.geometry import DTYPES, Geometry

T = TypeVar("T")

SIZE_MAX: Final = 2**31 - 1
LAYERS_MAX: Final = 1024
NAME_MAX: Final = 200
WIDTHS_MAX: Final = 200


@dataclass(frozen=True)
class SourceFacts:
    """A source, as it announces itself.

    Attributes:
        name: for people: what computes, and where.
        program: digest of its program, 32 bytes.
        weights: root of its weights, 32 bytes.
        geometry: of its K/V; ``layers`` and ``windows`` say the cache groups.
        heads: query heads.
        widths: lengths that it has programs for, ascending: a prompt is padded to the next one.
        streams: it can announce a layer range before the rest is computed.
        recurrent: it keeps state that is not K/V of single positions, which cannot be imported.

    """

    name: str
    program: bytes
    weights: bytes
    geometry: Geometry
    heads: int
    widths: tuple[int, ...]
    streams: bool
    recurrent: bool

    def width_for(self, tokens: int) -> int | None:
        """The smallest width that a prompt fits in."""
        return next((width for width in self.widths if width >= tokens), None)


def hello_of(facts: SourceFacts) -> Hello:
    """The frame that announces a source."""
    geometry = facts.geometry
    fields = {
        "name": facts.name,
        "program": facts.program.hex(),
        "weights": facts.weights.hex(),
        "dtype": geometry.dtype,
        "layers": geometry.layers,
        "windows": geometry.windows,
        "heads": facts.heads,
        "kv_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "vocab": geometry.vocab,
        "widths": facts.widths,
        "streams": facts.streams,
        "recurrent": facts.recurrent,
    }
    return Hello(json.dumps(fields))


def parse_hello(hello: Hello) -> SourceFacts:
    """Understand an announcement in full, or refuse it.

    Raises:
        FrameError: MALFORMED, naming the field.

    """
    fields = _object(hello.text)
    windows = _list(fields, "windows", LAYERS_MAX, _window)
    if len(windows) != _size(fields["layers"], "layers"):
        raise _malformed("windows", windows, f"one entry for each of the {fields['layers']} layers")
    widths = _list(fields, "widths", WIDTHS_MAX, _size)
    if list(widths) != sorted(set(widths)) or widths[-1] > TOKENS_MAX:
        raise _malformed("widths", widths, f"ascending numbers up to {TOKENS_MAX}")
    geometry = Geometry(
        dtype=_choice(fields["dtype"], "dtype"),
        kv_heads=_size(fields["kv_heads"], "kv_heads"),
        head_dim=_size(fields["head_dim"], "head_dim"),
        vocab=_size(fields["vocab"], "vocab"),
        windows=windows,
    )
    return SourceFacts(
        name=_name(fields["name"]),
        program=_digest(fields["program"], "program"),
        weights=_digest(fields["weights"], "weights"),
        geometry=geometry,
        heads=_size(fields["heads"], "heads"),
        widths=widths,
        streams=_flag(fields["streams"], "streams"),
        recurrent=_flag(fields["recurrent"], "recurrent"),
    )


_FIELDS: Final = {
    "name", "program", "weights", "dtype", "layers", "windows", "heads", "kv_heads", "head_dim", "vocab", "widths",
    "streams", "recurrent",
}  # fmt: skip


def _object(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FrameError(FrameFault.MALFORMED, f"hello: not JSON: {str(error)[:100]}") from error
    if not isinstance(fields, dict):
        raise FrameError(FrameFault.MALFORMED, "hello: not a JSON object")
    for name in sorted(_FIELDS - fields.keys()):
        raise FrameError(FrameFault.MALFORMED, f"hello.{name} is missing")
    for name in sorted(fields.keys() - _FIELDS):
        raise FrameError(FrameFault.UNKNOWN, f"hello.{name[:NAME_MAX]} is not a field of version 1")
    return fields


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key stands twice")
    return fields


def _list(fields: Mapping[str, Any], name: str, most: int, parse: Callable[[Any, str], T]) -> tuple[T, ...]:
    value = fields[name]
    if not isinstance(value, list) or not 1 <= len(value) <= most:
        raise _malformed(name, value, f"a list of 1 to {most} entries")
    return tuple(parse(item, name) for item in value)


def _window(value: Any, name: str) -> int | None:
    return None if value is None else _size(value, name)


def _size(value: Any, name: str) -> int:
    if type(value) is not int or not 0 < value <= SIZE_MAX:
        raise _malformed(name, value, "a positive integer")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise _malformed(name, value, "true or false")
    return value


def _choice(value: Any, name: str) -> str:
    if not isinstance(value, str) or value not in DTYPES:
        raise _malformed(name, value, f"one of {', '.join(DTYPES)}")
    return value


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= NAME_MAX or any(map(_is_surrogate, value)):
        raise _malformed("name", value, f"a text of 1 to {NAME_MAX} characters")
    return value


def _is_surrogate(character: str) -> bool:
    """Half of a character, which no UTF-8 can hold, but JSON can."""
    return 0xD800 <= ord(character) < 0xE000


def _digest(value: Any, name: str) -> bytes:
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-fA-F]{{{2 * DIGEST_BYTES}}}", value):
        raise _malformed(name, value, f"{2 * DIGEST_BYTES} hex digits")
    return bytes.fromhex(value)


def _malformed(name: str, value: Any, wanted: str) -> FrameError:
    return FrameError(FrameFault.MALFORMED, f"hello.{name} is {str(value)[:80]!r}; wanted: {wanted}")
