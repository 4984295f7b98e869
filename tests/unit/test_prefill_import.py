"""One remote prompt on its way into pages: complete, private until then, and gone without a trace if it fails."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
from support.prefill import GEOMETRY, logits_of, states_of

from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.device import DeviceError, DeviceFault
from rowlock.bindings.model.cache.geometry import CacheGeometry, CacheLimits, plan_geometry
from rowlock.bindings.model.cache.paged import PagedCache
from rowlock.bindings.model.cache.reservation import Reservation
from rowlock.bindings.model.cache.table import BlockTable
from rowlock.bindings.model.config import ModelConfig
from rowlock.bindings.model.rope import Rope
from rowlock.daemon.owner.requests import Lease
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.text import Text
from rowlock.daemon.prefill import importing
from rowlock.daemon.prefill.importing import ImportedPrompt
from rowlock.daemon.prefill.life import Arrival
from rowlock.daemon.prefill.prefiller import STEP_NS, SourcePrefiller
from rowlock.daemon.prefill.protocol.frames import Done, Failed, Memory, Refusal, Span
from rowlock.daemon.prefill.protocol.geometry import RequestLayout
from rowlock.daemon.prefill.protocol.memory import OwnerMemory, SourceMemory
from rowlock.daemon.prefill.settings import PrefillSettings
from rowlock.v1.errors import OwnerError, Reason

IDENTITY = Identity("11" * 32, "22" * 32, "33" * 32)
GENERATION = 7
PAGE = 4
PROMPT = tuple(random.Random(1).randrange(50) for _ in range(18))


CONFIG = ModelConfig(
    family="llama", vocab=50, hidden=16, intermediate=16, layers=5, heads=4, kv_heads=2, head_dim=8, context=64,
    norm_eps=1e-5, query_scale=0.35, tied=True, windows=GEOMETRY.windows, rope=Rope(1e4),
)  # fmt: skip


@dataclass
class Pool:
    """Pages, and the way into them, with a fence that can be made to fail."""

    cache: PagedCache
    fences: list[Exception] = field(default_factory=list)

    def fence(self) -> None:
        if self.fences:
            raise self.fences.pop()

    def open(self, prompt: tuple[int, ...], *_: Any) -> Room:
        return Room(Reservation(self.cache, np.array(prompt, np.int64), 64, len(prompt)))

    def free(self) -> list[int]:
        self.cache.check_integrity()
        return [group.available for group in self.cache.groups]


@dataclass
class Room:
    reservation: Reservation

    def __post_init__(self) -> None:
        self.wanted = self.reservation.wanted
        self.write = self.reservation.write
        self.release = self.reservation.release
        self.quarantine = self.reservation.quarantine

    def admit(self, logits: np.ndarray) -> tuple[Any, int]:
        return self.reservation.admit(), int(logits.argmax())


@pytest.fixture
def pool() -> Pool:
    planned = plan_geometry(CONFIG, 2, CacheLimits(page_tokens=PAGE), 1 << 30)
    groups = tuple(replace(group, pages=20) for group in planned.groups)
    return Pool(
        PagedCache(CONFIG, CacheGeometry(PAGE, planned.token_bytes, groups), torch.bfloat16, torch.device("cpu"))
    )


class Delivery:
    """An import, and a source that sends it what a test says."""

    def __init__(self, pool: Pool, prompt: tuple[int, ...] = PROMPT) -> None:
        self.ended: list[ImportedPrompt] = []
        lease = Lease(IDENTITY, GENERATION, cast(Text, None))
        self.clock = itertools.count(1)
        room = cast(Any, pool.open(prompt))
        importer = cast(Any, pool)
        self.item = ImportedPrompt(
            5, GEOMETRY, prompt, room, importer, lease, self.ended.append, partial(next, self.clock)
        )
        self.layout = self.item.layout
        self.prompt = prompt

    def memory(self, layout: RequestLayout | None = None) -> Arrival:
        """Filled with the right K/V wherever some is wanted."""
        layout = layout or self.layout
        source = SourceMemory.create(layout.nbytes)
        values = np.frombuffer(source.data, np.uint16)
        for layer in range(GEOMETRY.layers):
            part = states_of(self.prompt, layer)[:, :, layout.first(layer) :]
            values[layout.offsets[layer] // 2 : layout.offsets[layer + 1] // 2] = part.ravel()
        values[layout.logits_offset // 2 :] = logits_of(self.prompt)
        del values
        memory = OwnerMemory.attach(os.dup(source.fd), layout.nbytes)
        source.close()
        return Arrival(Memory(5, GENERATION, layout.nbytes), memory)

    def spans(self, layers: int = 1, chunk: int = 64) -> list[Span]:
        found = []
        for token in range(0, len(self.prompt), chunk):
            for block in range(0, GEOMETRY.layers, layers):
                for layer, stop in GEOMETRY.runs(block, min(block + layers, GEOMETRY.layers)):
                    first, last = max(token, self.layout.first(layer)), min(token + chunk, len(self.prompt))
                    if first < last:
                        found.append(Span(5, GENERATION, layer, stop, first, last, 1, 2, 8, 0))
        return found

    def done(self, spans: int) -> Done:
        return Done(5, GENERATION, spans, 1, GEOMETRY.vocab, 0)

    def send(self, *frames: Any) -> None:
        for frame in frames:
            self.item.take(frame if isinstance(frame, Arrival) else Arrival(frame))

    def send_all(self) -> None:
        spans = self.spans()
        self.send(self.memory(), *spans, self.done(len(spans)))
        self.item.copy()

    def admit(self, **changes: Any) -> tuple[BlockTable, int]:
        model = type("Model", (), {"identity": changes.pop("identity", IDENTITY)})
        resident = type("Resident", (), {"generation": changes.pop("generation", GENERATION), "model": model})
        return cast(Any, self.item.admit(cast(Resident, resident)))


@pytest.fixture
def deliver(pool: Pool) -> Iterator[Callable[..., Delivery]]:
    """Afterwards nothing is open, and no page is held."""
    made: list[Delivery] = []
    free = pool.free()

    def make(prompt: tuple[int, ...] = PROMPT) -> Delivery:
        made.append(Delivery(pool, prompt))
        return made[-1]

    yield make
    for item in made:
        item.item.end()
        assert len(item.ended) == 1
    quarantined = [group.pool.quarantined for group in pool.cache.groups]
    assert [now + gone for now, gone in zip(pool.free(), quarantined, strict=True)] == free


def pages_hold(table: BlockTable, prompt: tuple[int, ...]) -> None:
    for layer in range(GEOMETRY.layers):
        first = max(0, len(prompt) - 3) if GEOMETRY.windows[layer] else 0
        keys, values = (part.view(torch.int16).numpy().view(np.uint16) for part in table.read(layer, len(prompt)))
        expected = states_of(prompt, layer)
        assert (keys[:, first:] == expected[0, :, first:]).all()
        assert (values[:, first:] == expected[1, :, first:]).all()


@pytest.mark.parametrize("layers", [1, 3, 5])
@pytest.mark.parametrize("chunk", [PAGE, 5, 64])
@pytest.mark.parametrize("order", ["in order", "reversed", "shuffled"])
def test_spans_in_any_order_become_the_same_pages(
    deliver: Callable[..., Delivery], layers: int, chunk: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importing, "COPY_BYTES", 3 * GEOMETRY.token_bytes)
    delivery = deliver()
    spans = delivery.spans(layers, chunk)
    if order == "reversed":
        spans.reverse()
    elif order == "shuffled":
        random.Random(layers * 100 + chunk).shuffle(spans)
    delivery.send(delivery.memory(), *spans[:2])
    delivery.item.copy()
    assert max(nbytes for _, _, nbytes in delivery.item.timeline.copies) <= 3 * GEOMETRY.token_bytes
    delivery.send(*spans[2:], delivery.done(len(spans)))
    assert not delivery.item.complete
    delivery.item.copy()
    assert delivery.item.complete
    table, token = delivery.admit()
    assert token == logits_of(PROMPT).argmax()
    assert table.length == len(PROMPT)
    pages_hold(table, PROMPT)
    table.close()


def test_until_it_is_admitted_nobody_can_find_it(deliver: Callable[..., Delivery], pool: Pool) -> None:
    delivery = deliver()
    delivery.send_all()
    other = BlockTable(pool.cache, 64)
    other.begin(np.array(PROMPT, np.int64), len(PROMPT))
    assert other.length == 0
    other.close()
    table, _ = delivery.admit()
    other = BlockTable(pool.cache, 64)
    other.begin(np.array(PROMPT, np.int64), len(PROMPT))
    assert other.length == len(PROMPT) // PAGE * PAGE
    other.close()
    table.close()


def test_what_is_known_of_a_prompt_is_neither_asked_for_nor_written(deliver: Callable[..., Delivery]) -> None:
    first = deliver()
    first.send_all()
    table, _ = first.admit()
    second = deliver((*PROMPT[:17], PROMPT[17] ^ 1))
    assert second.layout.firsts == (16, 16)
    held = [pages[:4].tolist() for pages in table.pages]
    second.send_all()
    again, _ = second.admit()
    assert [pages[:4].tolist() for pages in again.pages] == held
    pages_hold(table, PROMPT)
    for layer in (2, 4):
        for known, own in zip(table.read(layer, 16), again.read(layer, 16), strict=True):
            assert torch.equal(known.view(torch.int16), own.view(torch.int16))
    table.close()
    again.close()


SPAN = Span(5, GENERATION, 2, 3, 0, 18, 1, 2, 8, 0)
WRONG: dict[str, tuple[Any, str]] = {
    "generation": (replace(SPAN, generation=6), "span.generation is 6, wanted 7"),
    "dtype": (replace(SPAN, dtype=3), "span.dtype is 3, wanted 1"),
    "kv_heads": (replace(SPAN, kv_heads=1), "span.kv_heads is 1, wanted 2"),
    "head_dim": (replace(SPAN, head_dim=16), "span.head_dim is 16, wanted 8"),
    "layer out of bounds": (replace(SPAN, layer=4, layer_stop=6), "span.layer_stop is 6, there are 5"),
    "layers of two groups": (replace(SPAN, layer=2, layer_stop=4), "not of one cache group"),
    "position out of bounds": (replace(SPAN, token_stop=19), "wanted are 0 to 18"),
    "position behind the window": (replace(SPAN, layer=0, layer_stop=1), "wanted are 15 to 18"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_span_fails_its_request_and_writes_nothing(
    deliver: Callable[..., Delivery], pool: Pool, name: str
) -> None:
    span, word = WRONG[name]
    before = [group.states.clone() for group in pool.cache.groups]
    delivery = deliver()
    delivery.send(delivery.memory(), span)
    delivery.item.copy()
    assert delivery.item.error is not None
    assert delivery.item.error.reason is Reason.SOURCE_FAILED
    assert word in str(delivery.item.error)
    for states, group in zip(before, pool.cache.groups, strict=True):
        assert torch.equal(states.view(torch.int16), group.states.view(torch.int16))


def _twice(spans: list[Span]) -> list[Span]:
    return [*spans, spans[0]]


def _overlapping(spans: list[Span]) -> list[Span]:
    return [*spans[:2], replace(spans[2], token=3, token_stop=9), *spans[2:]]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda spans: spans[1:], "layer 0 has 0 of 3 positions"),
        (lambda spans: spans[:-1], "layer 4 has 0 of 18 positions"),
        (_twice, "overlap 15 to 18"),
        (_overlapping, "overlap 3 to 9"),
    ],
)
def test_what_is_dropped_or_sent_twice_is_noticed(
    deliver: Callable[..., Delivery], change: Callable[[list[Span]], list[Span]], word: str
) -> None:
    delivery = deliver()
    spans = change(delivery.spans())
    delivery.send(delivery.memory(), *spans, delivery.done(len(spans)))
    assert word in str(delivery.item.error)
    assert not delivery.item.complete


def test_frames_out_of_turn_fail_the_request(deliver: Callable[..., Delivery]) -> None:
    cases: list[tuple[Callable[[Delivery], list[Any]], str]] = [
        (lambda d: [d.spans()[0]], "before its memory"),
        (lambda d: [d.done(0)], "before its memory"),
        (lambda d: [d.memory(), d.memory()], "memory came twice"),
        (lambda d: [d.memory(), d.done(0)], "before everything was there"),
        (lambda d: [d.memory(), *d.spans(), d.done(4)], "done.spans is 4, wanted 5"),
        (lambda d: [d.memory(), *d.spans(), replace(d.done(5), vocab=49)], "done.vocab is 49"),
        (lambda d: [d.memory(), *d.spans(), replace(d.done(5), generation=1)], "done.generation is 1"),
        (lambda d: [d.memory(RequestLayout(GEOMETRY, 18, (0, 0)))], "memory has"),
        (lambda d: [Arrival(Memory(5, GENERATION, 9), reason="memory: seals are 0x0")], "seals are 0x0"),
        (lambda d: [Failed(5, GENERATION, Refusal.COMPUTE, "too hot")], "too hot"),
        (lambda d: [Failed(5, 6, Refusal.COMPUTE, "too hot")], "failed.generation is 6, wanted 7"),
    ]
    for frames, word in cases:
        delivery = deliver()
        delivery.send(*frames(delivery))
        assert word in str(delivery.item.error)
        delivery.item.end()


def test_a_refusal_keeps_its_kind(deliver: Callable[..., Delivery]) -> None:
    for refusal, reason in ((Refusal.MEMORY, Reason.MEMORY_SHORT), (Refusal.WIDTH, Reason.CONTEXT_EXCEEDED)):
        delivery = deliver()
        delivery.send(Failed(5, GENERATION, refusal, "needs 9 bytes; 8 are available"))
        assert delivery.item.error is not None
        assert delivery.item.error.reason is reason


def test_it_can_end_after_every_span_and_its_pages_serve_others_at_once(
    deliver: Callable[..., Delivery], pool: Pool
) -> None:
    free = pool.free()
    for count in range(6):
        delivery = deliver()
        delivery.send(delivery.memory(), *delivery.spans()[:count])
        delivery.item.copy()
        delivery.item.end()
        assert pool.free() == free
        other = deliver(PROMPT[::-1])
        other.send_all()
        table, _ = other.admit()
        pages_hold(table, PROMPT[::-1])
        table.close()
        pool.cache.forget_prefixes()


def test_what_is_resident_is_checked_when_it_is_admitted(deliver: Callable[..., Delivery]) -> None:
    for changes in ({"generation": 8}, {"identity": replace(IDENTITY, weights="44" * 32)}):
        delivery = deliver()
        delivery.send_all()
        with pytest.raises(OwnerError, match="computed for generation 7") as caught:
            delivery.admit(**changes)
        assert caught.value.reason is Reason.SOURCE_FAILED


def test_what_cannot_be_fenced_is_not_admitted(deliver: Callable[..., Delivery], pool: Pool) -> None:
    delivery = deliver()
    delivery.send_all()
    pool.fences.append(DeviceError(DeviceFault.TIMEOUT, "no answer"))
    with pytest.raises(DeviceError, match="no answer"):
        delivery.admit()
    assert delivery.item.error is not None
    assert delivery.item.error.reason is Reason.DEVICE_FAILED
    assert not any(len(group.prefixes) for group in pool.cache.groups), "nobody can find it"


def test_no_copy_begins_after_the_moment_that_decoding_waits_for(deliver: Callable[..., Delivery]) -> None:
    delivery = deliver()
    spans = delivery.spans()
    delivery.send(delivery.memory(), *spans, delivery.done(len(spans)))
    copies = delivery.item.timeline.copies
    delivery.item.copy(until_ns := next(delivery.clock) + 8)
    assert 0 < len(copies) < len(spans)
    assert copies[-1][0] <= until_ns
    copied = len(copies)
    delivery.item.copy(until_ns)
    assert len(copies) == copied
    delivery.item.copy()
    assert delivery.item.complete


def test_a_step_s_time_is_shared_by_all_prompts(deliver: Callable[..., Delivery]) -> None:
    """Each look at the clock takes a fifth of it, so that the second prompt has no turn in the first step."""
    clock = itertools.count(0, STEP_NS // 5)
    prefiller = SourcePrefiller(PrefillSettings(), lambda: None, lambda *_, **__: None, partial(next, clock))
    first, second = deliver(), deliver()
    for number, delivery in enumerate((first, second)):
        delivery.item._now_ns = partial(next, clock)
        delivery.send(delivery.memory(), *delivery.spans())
        prefiller._live[number] = delivery.item
    copies = [delivery.item.timeline.copies for delivery in (first, second)]
    prefiller.step()
    assert [len(found) for found in copies] == [2, 0]
    while prefiller.waiting:
        prefiller.step()
    assert [len(found) for found in copies] == [len(first.spans()), len(second.spans())]
    prefiller._live.clear()


def test_pages_whose_copy_cannot_be_proved_to_have_ended_are_never_used_again(
    deliver: Callable[..., Delivery], pool: Pool
) -> None:
    free = pool.free()
    delivery = deliver()
    delivery.send(delivery.memory(), *delivery.spans())
    delivery.item.copy()
    pool.fences.append(DeviceError(DeviceFault.TIMEOUT, "no answer"))
    delivery.item.end()
    assert delivery.item.quarantined
    assert pool.free() == [count - gone for count, gone in zip(free, (5, 2), strict=True)]


def test_what_is_abandoned_asks_the_device_nothing(deliver: Callable[..., Delivery], pool: Pool) -> None:
    free = pool.free()
    delivery = deliver()
    delivery.send(delivery.memory(), *delivery.spans())
    delivery.item.copy()
    pool.fences.append(AssertionError("the device was asked"))
    delivery.item.end(abandon=True)
    pool.fences.clear()
    assert delivery.item.quarantined
    assert pool.free() == [count - gone for count, gone in zip(free, (5, 2), strict=True)]


def test_a_copy_that_fails_fails_its_request(deliver: Callable[..., Delivery]) -> None:
    delivery = deliver()

    def write(*_: Any) -> None:
        raise DeviceError(DeviceFault.LOST, "the device is gone")

    delivery.item._room.write = write  # type: ignore[method-assign]
    delivery.send(delivery.memory(), *delivery.spans())
    delivery.item.copy()
    assert delivery.item.error is not None
    assert delivery.item.error.reason is Reason.DEVICE_FAILED
    assert "the device is gone" in str(delivery.item.error)
