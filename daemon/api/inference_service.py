"""``rowlock.v1.InferenceService``."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import grpc

from rowlock.bindings.device import Sampling
from rowlock.daemon.api.errors import refusals
from rowlock.daemon.api.messages import identity_message
from rowlock.daemon.owner.owner import Owner
from rowlock.daemon.owner.requests import GenerationRequest, Lease
from rowlock.daemon.owner.text import TextStream
from rowlock.v1 import inference_pb2, inference_pb2_grpc
from rowlock.v1.errors import OwnerError, Reason

MAX_TOKENS_DEFAULT: Final = 64
MAX_TOKENS_LIMIT: Final = 1_000_000


@dataclass(frozen=True)
class _Started:
    lease: Lease
    prompt_tokens: int


@dataclass(frozen=True)
class _Finished:
    stopped: bool


class _QueueSink:
    """Carries an answer from the owner thread to the event loop; bounded by max_tokens."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue: asyncio.Queue[_Started | int | _Finished | Exception] = asyncio.Queue()

    def started(self, lease: Lease, prompt_tokens: int) -> None:
        self._put(_Started(lease, prompt_tokens))

    def token(self, token: int) -> None:
        self._put(token)

    def finished(self, *, stopped: bool) -> None:
        self._put(_Finished(stopped))

    def failed(self, error: Exception) -> None:
        self._put(error)

    def _put(self, item: _Started | int | _Finished | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            return


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """See ``proto/rowlock/v1/inference.proto``."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async with refusals(context):
            sink = _QueueSink()
            generation = await self._request(request, sink)
            self._owner.generate(generation)
            try:
                async for message in _answer(sink):
                    yield message
            finally:
                generation.cancelled.set()

    async def _request(self, request: inference_pb2.GenerateRequest, sink: _QueueSink) -> GenerationRequest:
        """A checked request; a text prompt is tokenised ahead under the resident assets."""
        tokens: tuple[int, ...] = ()
        assets = ""
        prompt: str | tuple[int, ...]
        if request.WhichOneof("input") == "tokens":
            prompt = tuple(request.tokens.ids)
        elif request.WhichOneof("input") == "prompt":
            prompt = request.prompt
            resident = self._owner.view.resident
            if resident is not None:
                tokens, assets = await asyncio.to_thread(resident.text.encode, prompt), resident.text.digest
        else:
            raise OwnerError(Reason.ARGUMENT_INVALID, "input: give a prompt or tokens")
        return GenerationRequest(
            id=uuid.uuid4().hex,
            prompt=prompt,
            max_tokens=_max_tokens(request.max_tokens),
            sampling=_sampling(request),
            ignore_eos=request.ignore_eos,
            sink=sink,
            tokens=tokens,
            assets=assets,
        )


def _max_tokens(value: int) -> int:
    if value > MAX_TOKENS_LIMIT:
        raise OwnerError(Reason.ARGUMENT_INVALID, f"max_tokens: {value} is over {MAX_TOKENS_LIMIT}")
    return value or MAX_TOKENS_DEFAULT


def _sampling(request: inference_pb2.GenerateRequest) -> Sampling:
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise OwnerError(Reason.ARGUMENT_INVALID, f"temperature: {request.temperature} is not a number from 0 up")
    if not 0 <= request.top_p <= 1:
        raise OwnerError(Reason.ARGUMENT_INVALID, f"top_p: {request.top_p} is not between 0 and 1")
    return Sampling(temperature=request.temperature, top_p=request.top_p or 1.0, top_k=request.top_k, seed=request.seed)


async def _answer(sink: _QueueSink) -> AsyncIterator[inference_pb2.GenerateResponse]:
    """The messages of one answer.

    Raises:
        OwnerError: the request was refused or failed.

    """
    first = await sink.queue.get()
    if isinstance(first, Exception):
        raise first
    assert isinstance(first, _Started)
    lease, text = first.lease, TextStream(first.lease.text)

    def message(**fields: Any) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(
            identity=identity_message(lease.identity),
            generation=lease.generation,
            prompt_tokens=first.prompt_tokens,
            **fields,
        )

    yield message()
    while True:
        item = await sink.queue.get()
        if isinstance(item, Exception):
            raise item
        if isinstance(item, _Finished):
            reason = inference_pb2.FINISH_REASON_STOP if item.stopped else inference_pb2.FINISH_REASON_LENGTH
            yield message(text=text.finish(), finish_reason=reason)
            return
        assert isinstance(item, int)
        yield message(tokens=[item], text=text.add([item]))
