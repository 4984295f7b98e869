"""The frames, byte by byte. docs/prefill-protocol.md is the text to this file.

A frame is one packet of a SOCK_SEQPACKET socket: a header of 16 bytes, then the body. Little-endian throughout.
What does not parse exactly is refused: no field is ever guessed, and no frame can do more than fail.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass
from enum import IntEnum, StrEnum
from typing import Any, ClassVar, Final, Self, TypeVar

from rowlock.daemon.prefill.protocol.geometry import DTYPE_CODES

E = TypeVar("E", bound=IntEnum)

MAGIC: Final = b"RLPF"
VERSION: Final = 1
HEADER: Final = struct.Struct("<4sHHII")
"""Magic, version, kind, bytes of the body, and four bytes that are zero."""
FRAME_MAX: Final = 128 * 1024
"""Bytes of a whole frame."""
TOKENS_MAX: Final = 31 * 1024
"""Tokens of one prompt: they travel in one frame."""
GROUPS_MAX: Final = 64
TEXT_MAX: Final = 1000
"""Bytes of a message."""
DIGEST_BYTES: Final = 32


class FrameFault(StrEnum):
    """Why bytes are not a frame."""

    TRUNCATED = "TRUNCATED"
    OVERSIZED = "OVERSIZED"
    VERSION = "VERSION"
    UNKNOWN = "UNKNOWN"
    MALFORMED = "MALFORMED"


class FrameError(Exception):
    """Bytes that are not a frame of this protocol; the message names the field."""

    def __init__(self, fault: FrameFault, message: str) -> None:
        super().__init__(f"{message} [{fault.value}]")
        self.fault = fault


class Mode(IntEnum):
    """When spans are announced: one for everything at the end, each at once, or each at the end (benchmarks)."""

    WHOLE = 0
    STREAM = 1
    DEFERRED = 2


class Refusal(IntEnum):
    """Why a source could not compute a prompt."""

    MEMORY = 1
    WIDTH = 2
    IDENTITY = 3
    COMPUTE = 4
    ARGUMENT = 5


@dataclass(frozen=True)
class Hello:
    """Source to owner, first: its description, as JSON; see :mod:`rowlock.daemon.prefill.protocol.hello`."""

    KIND: ClassVar[int] = 16
    text: str

    def body(self) -> bytes:
        return self.text.encode()

    @classmethod
    def parse(cls, body: bytes) -> Self:
        return cls(_text(body, "hello", FRAME_MAX))


@dataclass(frozen=True)
class Prefill:
    """Owner to source: compute a prompt.

    Attributes:
        request: a number that the owner never uses again in the life of this source.
        generation: the owner's, under which the request holds its lease.
        program: digest of the program, 32 bytes, that the source must have resident.
        weights: root of the weights, 32 bytes, likewise.
        mode: when spans are announced.
        layers_per_span: layers computed at a time by a source that streams, and so of a span, at most. For a whole
            result they are the source's own choice.
        chunk: tokens computed at a time, likewise; 0 is all.
        firsts: of each cache group, the first position that is wanted.
        tokens: the whole prompt.

    """

    KIND: ClassVar[int] = 1
    FIXED: ClassVar[struct.Struct] = struct.Struct("<QQ32s32sIIIII")
    request: int
    generation: int
    program: bytes
    weights: bytes
    mode: Mode
    layers_per_span: int
    chunk: int
    firsts: tuple[int, ...]
    tokens: tuple[int, ...]

    def body(self) -> bytes:
        groups, count = len(self.firsts), len(self.tokens)
        fixed = self.FIXED.pack(
            self.request, self.generation, self.program, self.weights, self.mode, self.layers_per_span, self.chunk,
            groups, count,
        )  # fmt: skip
        return fixed + struct.pack(f"<{groups}I{count}I", *self.firsts, *self.tokens)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        fixed, rest = _split(cls.FIXED, body, "prefill")
        request, generation, program, weights, mode, layers, chunk, groups, count = fixed
        if not 1 <= groups <= GROUPS_MAX:
            raise FrameError(FrameFault.MALFORMED, f"prefill.groups is {groups}, not 1 to {GROUPS_MAX}")
        if not 1 <= count <= TOKENS_MAX:
            raise FrameError(FrameFault.MALFORMED, f"prefill.tokens has {count}, not 1 to {TOKENS_MAX}")
        _exact(rest, 4 * (groups + count), "prefill")
        numbers = struct.unpack(f"<{groups + count}I", rest)
        firsts, tokens = numbers[:groups], numbers[groups:]
        if max(firsts) > count:
            raise FrameError(FrameFault.MALFORMED, f"prefill.firsts {max(firsts)} is past the {count} tokens")
        if layers < 1:
            raise FrameError(FrameFault.MALFORMED, "prefill.layers_per_span is 0")
        known = _member(Mode, mode, "prefill.mode")
        return cls(request, generation, program, weights, known, layers, chunk, firsts, tokens)


@dataclass(frozen=True)
class Release:
    """Owner to source: a request has ended, whether it was done or not; let its memory go."""

    KIND: ClassVar[int] = 2
    FIXED: ClassVar[struct.Struct] = struct.Struct("<QQ")
    request: int
    generation: int

    def body(self) -> bytes:
        return self.FIXED.pack(*astuple(self))

    @classmethod
    def parse(cls, body: bytes) -> Self:
        return cls(*_whole(cls.FIXED, body, "release"))


@dataclass(frozen=True)
class Memory:
    """Source to owner, with one file descriptor: the memory of a request, before its first span.

    Attributes:
        nbytes: its size.

    """

    KIND: ClassVar[int] = 17
    FIXED: ClassVar[struct.Struct] = struct.Struct("<QQQ")
    request: int
    generation: int
    nbytes: int

    def body(self) -> bytes:
        return self.FIXED.pack(*astuple(self))

    @classmethod
    def parse(cls, body: bytes) -> Self:
        return cls(*_whole(cls.FIXED, body, "memory"))


@dataclass(frozen=True)
class Span:
    """Source to owner: K/V of a range of layers and tokens lies in the request's memory, and will not change.

    Attributes:
        layer: first layer; all layers of a span are of one cache group.
        layer_stop: past the last.
        token: first position.
        token_stop: past the last.
        dtype: code of the dtype, see ``DTYPE_CODES``.
        kv_heads: as the source has stored them.
        head_dim: likewise.
        computed_ns: CLOCK_MONOTONIC when it had been computed.

    """

    KIND: ClassVar[int] = 18
    FIXED: ClassVar[struct.Struct] = struct.Struct("<QQIIIIIIIIQ")
    request: int
    generation: int
    layer: int
    layer_stop: int
    token: int
    token_stop: int
    dtype: int
    kv_heads: int
    head_dim: int
    computed_ns: int

    def body(self) -> bytes:
        *front, computed_ns = astuple(self)
        return self.FIXED.pack(*front, 0, computed_ns)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        span = cls(*_without_reserved(_whole(cls.FIXED, body, "span"), "span"))
        if span.dtype not in DTYPE_CODES.values():
            raise FrameError(FrameFault.MALFORMED, f"span.dtype is {span.dtype}, which names no dtype")
        if span.layer >= span.layer_stop or span.token >= span.token_stop:
            raise FrameError(FrameFault.MALFORMED, "span covers nothing: it must end after where it begins")
        return span


@dataclass(frozen=True)
class Done:
    """Source to owner: all spans of a request were announced, and the logits lie in its memory.

    Attributes:
        spans: how many were announced.
        dtype: of the logits.
        vocab: how many there are.
        computed_ns: CLOCK_MONOTONIC when the last layer was computed.

    """

    KIND: ClassVar[int] = 19
    FIXED: ClassVar[struct.Struct] = struct.Struct("<QQIIIIQ")
    request: int
    generation: int
    spans: int
    dtype: int
    vocab: int
    computed_ns: int

    def body(self) -> bytes:
        *front, computed_ns = astuple(self)
        return self.FIXED.pack(*front, 0, computed_ns)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        return cls(*_without_reserved(_whole(cls.FIXED, body, "done"), "done"))


@dataclass(frozen=True)
class Failed:
    """Source to owner: a request could not be computed; the source goes on with others."""

    KIND: ClassVar[int] = 20
    FIXED: ClassVar[struct.Struct] = struct.Struct("<QQI")
    request: int
    generation: int
    refusal: Refusal
    text: str

    def body(self) -> bytes:
        return self.FIXED.pack(self.request, self.generation, self.refusal) + clipped(self.text)

    @classmethod
    def parse(cls, body: bytes) -> Self:
        (request, generation, refusal), rest = _split(cls.FIXED, body, "failed")
        return cls(
            request, generation, _member(Refusal, refusal, "failed.refusal"), _text(rest, "failed.text", TEXT_MAX)
        )


Frame = Hello | Prefill | Release | Memory | Span | Done | Failed
_KINDS: Final[dict[int, type[Frame]]] = {
    kind.KIND: kind for kind in (Hello, Prefill, Release, Memory, Span, Done, Failed)
}


def pack(frame: Frame) -> bytes:
    """A frame as the bytes of one packet.

    Raises:
        FrameError: OVERSIZED.

    """
    body = frame.body()
    if HEADER.size + len(body) > FRAME_MAX:
        raise FrameError(FrameFault.OVERSIZED, f"a frame of {HEADER.size + len(body)} bytes; {FRAME_MAX} are allowed")
    return HEADER.pack(MAGIC, VERSION, frame.KIND, len(body), 0) + body


def parse(packet: bytes) -> Frame:
    """The frame that a packet is.

    Raises:
        FrameError: it is none. Nothing else, whatever the bytes are.

    """
    if len(packet) > FRAME_MAX:
        raise FrameError(FrameFault.OVERSIZED, f"a packet of more than {FRAME_MAX} bytes")
    if len(packet) < HEADER.size:
        raise FrameError(FrameFault.TRUNCATED, f"a packet of {len(packet)} bytes; the header alone has {HEADER.size}")
    magic, version, kind, length, zero = HEADER.unpack_from(packet)
    if magic != MAGIC or zero:
        raise FrameError(FrameFault.MALFORMED, f"header: {packet[: HEADER.size].hex()} is not one of this protocol")
    if version != VERSION:
        raise FrameError(FrameFault.VERSION, f"version is {version}; this side speaks {VERSION}")
    if kind not in _KINDS:
        raise FrameError(FrameFault.UNKNOWN, f"kind is {kind}, which there is not")
    _exact(packet[HEADER.size :], length, "header.length")
    return _KINDS[kind].parse(packet[HEADER.size :])


def clipped(text: str) -> bytes:
    """A message of at most ``TEXT_MAX`` bytes, never cut inside a character."""
    return text.encode(errors="replace")[:TEXT_MAX].decode(errors="ignore").encode()


def _whole(fixed: struct.Struct, body: bytes, name: str) -> tuple[Any, ...]:
    _exact(body, fixed.size, name)
    return fixed.unpack(body)


def _without_reserved(fields: tuple[Any, ...], name: str) -> list[Any]:
    """The fields without the last but one, which must be zero."""
    *front, zero, last = fields
    if zero:
        raise FrameError(FrameFault.MALFORMED, f"{name}.reserved is not zero")
    return [*front, last]


def _split(fixed: struct.Struct, body: bytes, name: str) -> tuple[tuple[Any, ...], bytes]:
    if len(body) < fixed.size:
        raise FrameError(FrameFault.TRUNCATED, f"{name}: {len(body)} bytes of at least {fixed.size}")
    return fixed.unpack_from(body), body[fixed.size :]


def _exact(data: bytes, wanted: int, name: str) -> None:
    if len(data) != wanted:
        fault = FrameFault.TRUNCATED if len(data) < wanted else FrameFault.OVERSIZED
        raise FrameError(fault, f"{name}: {len(data)} bytes, not {wanted}")


def _text(data: bytes, name: str, bytes_max: int) -> str:
    if len(data) > bytes_max:
        raise FrameError(FrameFault.OVERSIZED, f"{name}: {len(data)} bytes; {bytes_max} are allowed")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FrameError(FrameFault.MALFORMED, f"{name}: not UTF-8") from error


def _member(kind: type[E], value: int, name: str) -> E:
    try:
        return kind(value)
    except ValueError:
        raise FrameError(FrameFault.MALFORMED, f"{name} is {value}, which there is not") from None
