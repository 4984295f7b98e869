"""The source's loop: what it announces lies in memory, a request can end at any block, and the next one works."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np
import pytest
from support.prefill import GEOMETRY, SyntheticEngine, logits_of, prefill_of, running_worker, states_of

from rowlock.daemon.prefill import worker as worker_module
from rowlock.daemon.prefill.engine import EngineError
from rowlock.daemon.prefill.pacing import PacedEngine
from rowlock.daemon.prefill.protocol.frames import Done, Failed, Frame, FrameError, Memory, Mode, Refusal, Release, Span
from rowlock.daemon.prefill.protocol.link import Link
from rowlock.daemon.prefill.protocol.memory import SourceMemory

PROMPT = tuple(range(1, 14))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("layers", [1, 3, 5])
@pytest.mark.parametrize("chunk", [0, 4, 7])
@pytest.mark.parametrize("firsts", [(10, 0), (10, 8), (13, 13)])
def test_spans_cover_exactly_what_was_asked_for(mode: Mode, layers: int, chunk: int, firsts: tuple[int, int]) -> None:
    prefill = prefill_of(1, PROMPT, mode, layers_per_span=layers, chunk=chunk, firsts=firsts)
    with running_worker(SyntheticEngine()) as owner:
        owner.link.send(prefill)
        spans, done = owner.until_end()
        assert isinstance(done, Done)
        assert done.spans == len(spans)
        covered = {layer: np.zeros(len(PROMPT), int) for layer in range(GEOMETRY.layers)}
        for span in spans:
            for layer in range(span.layer, span.layer_stop):
                covered[layer][span.token : span.token_stop] += 1
                expected = states_of(PROMPT, layer)[:, :, span.token : span.token_stop]
                assert (owner.states(prefill, span)[layer - span.layer] == expected).all()
            assert len({GEOMETRY.group_of[layer] for layer in range(span.layer, span.layer_stop)}) == 1
            assert mode is Mode.WHOLE or span.layer_stop - span.layer <= layers
        for layer, counts in covered.items():
            first = firsts[GEOMETRY.group_of[layer]]
            assert (counts == [0] * first + [1] * (len(PROMPT) - first)).all()
        assert (owner.logits(prefill) == logits_of(PROMPT)).all()


def test_a_span_is_announced_before_the_next_block_is_computed_only_when_streaming() -> None:
    for mode, expected in ((Mode.STREAM, True), (Mode.WHOLE, False), (Mode.DEFERRED, False)):
        gate = threading.Semaphore(1)
        engine = SyntheticEngine(before_block=lambda number, gate=gate: gate.acquire() and None)
        with running_worker(engine) as owner:
            owner.link.send(prefill_of(1, PROMPT, mode, layers_per_span=1))
            assert isinstance(owner.next(), Memory)
            if expected:
                assert isinstance(owner.next(), Span)  # while the second block waits at the gate
            else:
                with pytest.raises(BlockingIOError):
                    owner.link.receive(wait=False)
            gate.release(100)
            assert isinstance(owner.until_end()[1], Done)


@pytest.mark.parametrize(
    ("fields", "refusal", "word"),
    [
        ({"tokens": (1,) * 65}, Refusal.WIDTH, "65 tokens; the widest program here is for 64"),
        ({"tokens": (50,)}, Refusal.ARGUMENT, "50 is not below 50"),
        ({"weights": b"x" * 32}, Refusal.IDENTITY, "weights"),
        ({"firsts": (0,)}, Refusal.ARGUMENT, "1 groups, there are 2"),
    ],
)
def test_a_refused_prompt_is_its_own_error_and_the_next_one_works(
    fields: dict[str, object], refusal: Refusal, word: str
) -> None:
    bad = {"request": 1, "tokens": PROMPT, "firsts": (0, 0), **fields}
    with running_worker(SyntheticEngine()) as owner:
        owner.link.send(prefill_of(**bad))  # type: ignore[arg-type]
        _, failed = owner.until_end()
        assert isinstance(failed, Failed)
        assert failed.refusal is refusal
        assert word in failed.text
        owner.link.send(prefill_of(2, PROMPT))
        assert isinstance(owner.until_end()[1], Done)


def test_what_is_announced_lies_in_memory_by_then_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at on the source's own thread, in the moment of each announcement."""
    prefill, seen = prefill_of(1, PROMPT, layers_per_span=1, chunk=4), []
    place = worker_module._Answer._place
    answers: list[worker_module._Answer] = []

    def placed(self: worker_module._Answer, *where: Any) -> None:
        answers[:] = [self]
        place(self, *where)

    def sent(self: Link, frame: Frame, *fd: int, **how: bool) -> None:
        if isinstance(frame, Span):
            seen.append((frame, states_in(answers[0], frame)))
        send(self, frame, *fd, **how)

    send = Link.send
    monkeypatch.setattr(worker_module._Answer, "_place", placed)
    monkeypatch.setattr(Link, "send", sent)
    with running_worker(SyntheticEngine()) as owner:
        send(owner.link, prefill)
        owner.until_end()
        assert len(seen) == 14
        for span, states in seen:
            expected = states_of(PROMPT, span.layer)[:, :, span.token : span.token_stop]
            assert (states == expected).all(), f"{span} was announced too early"
            assert (owner.states(prefill, span)[0] == expected).all(), f"{span} has changed since"


def states_in(answer: worker_module._Answer, span: Span) -> np.ndarray:
    """Of one layer, as they lie in the source's memory now."""
    layout = answer.layout
    region = answer._values[layout.offsets[span.layer] // 2 : layout.offsets[span.layer + 1] // 2]
    shaped = region.reshape(2, GEOMETRY.kv_heads, -1, GEOMETRY.head_dim)
    first = layout.first(span.layer)
    return shaped[:, :, span.token - first : span.token_stop - first].copy()


def test_a_list_of_tokens_will_do_too() -> None:
    with running_worker(SyntheticEngine()) as owner:
        prefill = prefill_of(1, cast(Any, list(PROMPT)))
        owner.link.send(prefill)
        assert isinstance(owner.until_end()[1], Done)
        assert (owner.logits(prefill) == logits_of(PROMPT)).all()


def test_a_prompt_is_given_the_next_width() -> None:
    engine = SyntheticEngine()
    with running_worker(engine) as owner:
        for request, count in enumerate((1, 16, 17, 64)):
            owner.link.send(prefill_of(request, (1,) * count))
            owner.until_end()
    assert [work.width for work in engine.done] == [16, 16, 64, 64]


def test_memory_that_one_answer_may_not_have_is_refused_with_the_numbers() -> None:
    with running_worker(SyntheticEngine(), memory_max=1000) as owner:
        owner.link.send(prefill_of(1, PROMPT))
        _, failed = owner.until_end()
        assert isinstance(failed, Failed)
        assert failed.refusal is Refusal.MEMORY
        assert "bytes; 1000 are allowed" in failed.text


def test_a_device_that_fails_at_one_prompt_computes_the_next() -> None:
    failing = [True]

    def before_block(number: int) -> None:
        if number == 1 and failing:
            failing.clear()
            raise EngineError("the device is tired")

    with running_worker(SyntheticEngine(before_block=before_block)) as owner:
        owner.link.send(prefill_of(1, PROMPT))
        _, failed = owner.until_end()
        assert isinstance(failed, Failed)
        assert (failed.refusal, failed.text) == (Refusal.COMPUTE, "the device is tired")
        owner.link.send(prefill_of(2, PROMPT))
        assert isinstance(owner.until_end()[1], Done)


def test_a_released_prompt_is_not_finished_and_holds_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, created, closed = threading.Semaphore(1), [], []
    create, close = SourceMemory.create.__func__, SourceMemory.close  # type: ignore[attr-defined]
    monkeypatch.setattr(
        SourceMemory, "create", classmethod(lambda cls, size: created.append(size) or create(cls, size))
    )
    monkeypatch.setattr(SourceMemory, "close", lambda self: closed.append(1) or close(self))
    engine = SyntheticEngine(before_block=lambda _number: gate.acquire() and None)
    with running_worker(engine) as owner:
        for request in (1, 2, 3):
            owner.link.send(prefill_of(request, PROMPT, layers_per_span=1))
        assert isinstance(owner.next(), Memory)
        owner.link.send(Release(1, 3))
        owner.link.send(Release(2, 3))
        gate.release(1000)
        spans, done = owner.until_end()
        assert isinstance(done, Done)
        assert (done.request, done.spans) == (3, GEOMETRY.layers)
        assert {span.request for span in spans} <= {1, 3}
    assert len(engine.done) == 1
    assert len(created) == len(closed) == 2


def test_an_owner_that_sends_nonsense_is_left() -> None:
    own_frame = Done(1, 3, 0, 1, 50, 0)
    twice = [prefill_of(1, PROMPT), prefill_of(2, PROMPT), prefill_of(2, PROMPT)]
    for frames, word in (([own_frame], "done is nothing for a source"), (twice, "is live already")):
        with pytest.raises(FrameError, match=word):
            _send_and_read_on(frames)


def _send_and_read_on(frames: list[Frame]) -> None:
    gate = threading.Semaphore(0)
    with running_worker(SyntheticEngine(before_block=lambda _number: gate.acquire() and None)) as owner:
        for frame in frames:
            owner.link.send(frame)
        gate.release(1000)
        while owner.link.receive() is not None:
            pass


def test_a_paced_engine_gives_the_same_after_the_time_it_is_told_to_take() -> None:
    waits: list[float] = []

    def now() -> float:
        """Each wait takes a tenth of a second longer than it should."""
        return sum(waits) + 0.1 * len(waits)

    engine = PacedEngine(SyntheticEngine(), 0.5, waits.append, now)  # type: ignore[arg-type]
    with running_worker(engine) as owner:  # type: ignore[arg-type]
        for request in (1, 2):
            prefill = prefill_of(request, PROMPT)
            owner.link.send(prefill)
            spans, _ = owner.until_end()
            for span in spans:
                expected = np.stack([states_of(PROMPT, layer) for layer in range(span.layer, span.layer_stop)])
                assert (owner.states(prefill, span) == expected[:, :, :, span.token : span.token_stop]).all()
    assert waits == pytest.approx([1.0, 0.9, 0.4] * 2), "late wake-ups do not add up"
