"""The endpoints that generate: whole responses, and server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rowlock.daemon.answering.answers import Answer, Answers, Finish, Piece, Started
from rowlock.daemon.answering.question import checked_pin
from rowlock.daemon.http.bodies import read_json
from rowlock.daemon.http.forms import Form, Head, Usage
from rowlock.daemon.http.parameters import Call, Frame
from rowlock.daemon.http.problems import HttpError, problem_of
from rowlock.v1.errors import OwnerError, Reason

IDENTITY_HEADER: Final = "x-rowlock-identity"
"""Of a response: the digest that answers. Of a request: the one that has to, or its beginning."""
GENERATION_HEADER: Final = "x-rowlock-generation"

Read: TypeAlias = Callable[[dict[str, Any], Frame], Call]
Log: TypeAlias = Callable[..., None]


@dataclass(frozen=True)
class Service:
    """What every generating endpoint works with.

    Attributes:
        model: the name that callers use.
        deadline_s: of a response.
        new_id: makes ids of responses.
        now: seconds since the epoch.
        log: takes an event name and fields.

    """

    answers: Answers
    model: str
    deadline_s: float
    new_id: Callable[[], str]
    now: Callable[[], float]
    log: Log


class Generating:
    """One endpoint, as an ASGI application.

    Args:
        service: shared by all of them.
        read: makes a call of a body.
        form: writes answers.

    """

    def __init__(self, service: Service, read: Read, form: Form) -> None:
        self._service = service
        self._read = read
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, sending = Request(scope, receive), _Sending(send)
        try:
            call = self._read(await read_json(request), self._frame(request))
            await _while_connected(self._respond(call, sending, scope), receive)
        except ClientDisconnect:
            return
        except Exception as error:  # noqa: BLE001 - the edge of a request
            problem = problem_of(error)
            if problem.status == 500:
                self._service.log("http.failed", path=scope["path"], error=repr(error), exc_info=error)
            await sending.fail(problem, scope)

    def _frame(self, request: Request) -> Frame:
        pinned = checked_pin(request.headers.get(IDENTITY_HEADER, ""), IDENTITY_HEADER)
        return Frame(self._service.model, pinned, self._service.deadline_s)

    async def _respond(self, call: Call, sending: _Sending, scope: Scope) -> None:
        """Answer a call. Everything that it holds is given back before the last byte is sent."""
        async with AsyncExitStack() as asked:
            answers = [
                await asked.enter_async_context(self._service.answers.ask(question, "http"))
                for question in call.questions
            ]
            first, prompt_tokens = await _started(answers)
            head = self._head(first)
            headers = {
                IDENTITY_HEADER: head.fingerprint,
                GENERATION_HEADER: str(first.lease.generation),
                "x-request-id": head.id,
            }
            if call.stream:
                await sending.begin(headers)
                last = await self._stream(call, answers, prompt_tokens, head, sending)
            else:
                whole = await self._whole(answers, prompt_tokens, head)
        if call.stream:
            await sending.end(last)
        else:
            await Response(_json(whole), headers=headers, media_type="application/json")(
                scope, sending.receive_nothing, sending.send
            )

    def _head(self, first: Started) -> Head:
        service = self._service
        return Head(
            f"{self._form.prefix}-{service.new_id()}", int(service.now()), service.model, first.lease.identity.digest
        )

    async def _whole(self, answers: list[Answer], prompt_tokens: int, head: Head) -> dict[str, Any]:
        texts, finishes, tokens = [""] * len(answers), [Finish.STOP] * len(answers), 0
        async for index, piece in _merged(answers):
            texts[index] += piece.text
            tokens += len(piece.tokens)
            finishes[index] = piece.finish or finishes[index]
        choices = [
            self._form.choice(index, text, finish)
            for index, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
        return {**head.fields(self._form.whole), "choices": choices, "usage": Usage(prompt_tokens, tokens).fields()}

    async def _stream(
        self, call: Call, answers: list[Answer], prompt_tokens: int, head: Head, sending: _Sending
    ) -> bytes:
        """Send an event for each piece of text; the last event is returned."""
        fields, tokens = head.fields(self._form.chunk), 0
        if call.include_usage:
            fields["usage"] = None
        for index in range(len(answers)):
            opening = self._form.opening(index)
            if opening is not None:
                await sending.event({**fields, "choices": [opening]})
        async for index, piece in _merged(answers):
            tokens += len(piece.tokens)
            if piece.text or piece.finish:
                await sending.event({**fields, "choices": [self._form.delta(index, piece.text, piece.finish)]})
        if call.include_usage:
            await sending.event({**fields, "choices": [], "usage": Usage(prompt_tokens, tokens).fields()})
        return b"data: [DONE]\n\n"


class _Sending:
    """One response on its way.

    Attributes:
        begun: its status has been sent.

    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def send(self, message: Any) -> None:
        self.begun = True
        await self._send(message)

    async def receive_nothing(self) -> Any:
        raise AssertionError("a whole response reads nothing")

    async def begin(self, headers: dict[str, str]) -> None:
        """Begin a stream of events."""
        told = {**headers, "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in told.items()]
        await self.send({"type": "http.response.start", "status": 200, "headers": raw})

    async def event(self, value: dict[str, Any]) -> None:
        await self.send({"type": "http.response.body", "body": b"data: " + _json(value) + b"\n\n", "more_body": True})

    async def end(self, last: bytes) -> None:
        await self.send({"type": "http.response.body", "body": last, "more_body": False})

    async def fail(self, problem: HttpError, scope: Scope) -> None:
        """Tell of a problem: as the response, or as the last event of one that has begun."""
        if self.begun:
            await self.end(b"data: " + json.dumps(problem.body).encode() + b"\n\n")
        else:
            await problem.response()(scope, self.receive_nothing, self.send)


async def _started(answers: list[Answer]) -> tuple[Started, int]:
    """The first of the answers, and the prompt tokens of all: they have to be of one identity."""
    started = [await answer.started() for answer in answers]
    if len({item.lease.generation for item in started}) > 1:
        raise OwnerError(Reason.DRAINED, "a transition came between the prompts of this request")
    return started[0], sum(item.prompt_tokens for item in started)


async def _merged(answers: list[Answer]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of several answers, each as soon as it comes, with the number of its answer."""
    streams = [answer.pieces() for answer in answers]
    waiting = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                piece, index = task.result(), waiting.pop(task)
                yield index, piece
                if piece.finish is None:
                    waiting[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _while_connected(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Do some work; leave it when the client hangs up."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_until_hung_up(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        working.cancel()  # nothing, where it is done
    try:
        await working
    except asyncio.CancelledError:
        if not gone.done():
            raise


async def _until_hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
