"""Answers of the owner, as text in pieces."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from rowlock.daemon.answering.meter import Measurement, Meter
from rowlock.daemon.answering.question import Question
from rowlock.daemon.answering.stops import StopStrings
from rowlock.daemon.owner.outcome import reason_of
from rowlock.daemon.owner.owner import Owner
from rowlock.daemon.owner.requests import GenerationRequest, Lease, check_context
from rowlock.daemon.owner.text import TextStream
from rowlock.v1.errors import OwnerError, Reason

T = TypeVar("T")


class Finish(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class Started:
    """What is known once the owner has begun to compute: who answers."""

    lease: Lease
    prompt_tokens: int


@dataclass(frozen=True)
class Piece:
    """A part of an answer.

    Attributes:
        text: what is now certain; empty while a character or a stop string may still be incomplete.
        tokens: computed since the piece before.
        finish: set on the last one.

    """

    text: str
    tokens: tuple[int, ...] = ()
    finish: Finish | None = None


class Answers:
    """Asks the owner for clients of any API.

    Args:
        owner: the core.
        meter: counts.
        stall_s: a reader that does not take a piece for so long is given up.
        writers: render and tokenise prompts. A chat template may keep one for ever, so nothing may wait for them.

    """

    def __init__(self, owner: Owner, meter: Meter, stall_s: float, writers: Executor) -> None:
        self._owner = owner
        self._meter = meter
        self._stall_s = stall_s
        self._writers = writers

    @asynccontextmanager
    async def ask(self, question: Question, api: str) -> AsyncIterator[Answer]:
        """Queue a question; leaving the block gives up what is not computed yet.

        Raises:
            OwnerError: the prompt cannot be rendered or tokenised, not in time, or is too long for the resident model.

        """
        measurement, outcome = self._meter.begin(api), Reason.CANCELLED.value.lower()
        try:
            sink, deadline = _QueueSink(), _Deadline(question.deadline_s)
            request = await deadline.before(self._request(question, sink))
            self._owner.generate(request)
            answer = Answer(question, request, sink.queue, measurement, self._stall_s, deadline)
            try:
                yield answer
                outcome = answer.finish or outcome
            finally:
                request.cancelled.set()
        except Exception as error:
            outcome = reason_of(error).lower()
            raise
        finally:
            measurement.ended(outcome)

    async def _request(self, question: Question, sink: _QueueSink) -> GenerationRequest:
        """What the owner is asked; a prompt is tokenised ahead under the resident assets."""
        tokens: tuple[int, ...] = ()
        assets = ""
        resident, prompt = self._owner.view.resident, question.prompt
        if resident is not None and not isinstance(prompt, tuple):
            loop = asyncio.get_running_loop()
            tokens, assets = (
                await loop.run_in_executor(self._writers, resident.text.tokens_of, prompt),
                resident.text.digest,
            )
        view = self._owner.view
        if view.resident is not None and not view.transition:
            # what can be refused now is not kept in the queue
            length = len(prompt) if isinstance(prompt, tuple) else len(tokens)
            check_context(length, question.max_tokens or 1, view.resident.config.context)
        return GenerationRequest(
            id=uuid.uuid4().hex,
            prompt=question.prompt,
            max_tokens=question.max_tokens,
            sampling=question.sampling,
            ignore_eos=question.ignore_eos,
            sink=sink,
            tokens=tokens,
            assets=assets,
        )


class Answer:
    """One answer: first :meth:`started`, then :meth:`pieces`, once.

    Attributes:
        finish: why it ended, once it has.

    """

    def __init__(
        self, question: Question, request: GenerationRequest, queue: asyncio.Queue[_Item], measurement: Measurement,
        stall_s: float, deadline: _Deadline,
    ) -> None:  # fmt: skip
        self.finish: Finish | None = None
        self._question = question
        self._request = request
        self._queue = queue
        self._measurement = measurement
        self._stall_s = stall_s
        self._stalled = False
        self._deadline = deadline

    async def started(self) -> Started:
        """Wait until the owner has begun.

        Raises:
            OwnerError: the request was refused, or failed, or another identity answers than was pinned.

        """
        started = await self._next()
        assert isinstance(started, Started)
        resident, pinned = started.lease.identity.digest, self._question.identity
        if not resident.startswith(pinned):
            raise OwnerError(Reason.IDENTITY_DIFFERS, f"{pinned} was pinned, and {resident} answers")
        self._lease = started.lease
        self._measurement.started(started.prompt_tokens)
        return started

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer, a piece for each token.

        Raises:
            OwnerError: the request failed, or its deadline passed, or its reader stalled.

        """
        text, stops = TextStream(self._lease.text), StopStrings(self._question.stops)
        while True:
            item = await self._next()
            if isinstance(item, int):
                self._measurement.token()
                piece = Piece(stops.add(text.add([item])), (item,), Finish.STOP if stops.found else None)
            else:
                assert isinstance(item, Finish)
                last = stops.add(text.finish())
                piece = Piece(last + stops.finish(), finish=Finish.STOP if stops.found else item)
            if piece.finish is not None:
                self.finish = piece.finish
                self._request.cancelled.set()  # there may be more to come where a stop string was found
                yield piece
                return
            with self._reading():
                yield piece

    async def _next(self) -> Started | int | Finish:
        item = await self._deadline.before(self._queue.get())
        if isinstance(item, Exception):
            raise item
        return item

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """While the reader has a piece: it holds pages of the cache, and may not do so for ever."""
        timer = asyncio.get_running_loop().call_later(self._stall_s, self._stall)
        try:
            yield
        finally:
            timer.cancel()
        if self._stalled:
            raise OwnerError(Reason.READER_STALLED, f"nothing was read for {self._stall_s:g} s")

    def _stall(self) -> None:
        self._stalled = True
        self._request.cancelled.set()


class _Deadline:
    """When an answer is given up; never, without a limit."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._at = None if limit_s is None else asyncio.get_running_loop().time() + limit_s

    async def before(self, work: Awaitable[T]) -> T:
        """What the work gives. Raises OwnerError when it does not give it in time."""
        try:
            async with asyncio.timeout_at(self._at):
                return await work
        except TimeoutError:
            limit = self._limit_s
            raise OwnerError(Reason.DEADLINE_PASSED, f"the answer was not complete after {limit:g} s") from None


_Item = Started | int | Finish | Exception


class _QueueSink:
    """Carries an answer from the owner thread to the event loop; bounded by max_tokens."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[_Item] = asyncio.Queue()

    def started(self, lease: Lease, prompt_tokens: int) -> None:
        self._put(Started(lease, prompt_tokens))

    def token(self, token: int) -> None:
        self._put(token)

    def finished(self, *, stopped: bool) -> None:
        self._put(Finish.STOP if stopped else Finish.LENGTH)

    def failed(self, error: Exception) -> None:
        self._put(error)

    def _put(self, item: _Item) -> None:
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            return
