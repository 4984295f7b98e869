"""``rowlock.v1.InferenceService``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from rowlock.daemon.answering.answers import Answers, Finish, Started
from rowlock.daemon.answering.question import Question, checked_pin, checked_sampling, checked_stops
from rowlock.daemon.api.errors import refusals
from rowlock.daemon.api.messages import identity_message
from rowlock.v1 import inference_pb2, inference_pb2_grpc
from rowlock.v1.errors import OwnerError, Reason

MAX_TOKENS_DEFAULT: Final = 64
MAX_TOKENS_LIMIT: Final = 1_000_000
FINISH_REASONS: Final = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    Finish.STOP: inference_pb2.FINISH_REASON_STOP,
    Finish.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """See ``proto/rowlock/v1/inference.proto``."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def Generate(  # noqa: N802 - gRPC's name
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        async with refusals(context), self._answers.ask(_question(request), "grpc") as answer:
            started = await answer.started()
            yield _message(started)
            async for piece in answer.pieces():
                yield _message(
                    started, text=piece.text, tokens=piece.tokens, finish_reason=FINISH_REASONS[piece.finish]
                )


def _message(started: Started, **fields: Any) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        identity=identity_message(started.lease.identity),
        generation=started.lease.generation,
        prompt_tokens=started.prompt_tokens,
        **fields,
    )


def _question(request: inference_pb2.GenerateRequest) -> Question:
    """A checked request. Raises OwnerError, naming the field."""
    prompt: str | tuple[int, ...]
    match request.WhichOneof("input"):
        case "tokens":
            prompt = tuple(request.tokens.ids)
        case "prompt":
            prompt = request.prompt
        case _:
            raise OwnerError(Reason.ARGUMENT_INVALID, "input: give a prompt or tokens")
    if request.max_tokens > MAX_TOKENS_LIMIT:
        raise OwnerError(Reason.ARGUMENT_INVALID, f"max_tokens: {request.max_tokens} is over {MAX_TOKENS_LIMIT}")
    return Question(
        prompt=prompt,
        max_tokens=request.max_tokens or MAX_TOKENS_DEFAULT,
        sampling=checked_sampling(request.temperature, request.top_p or 1.0, request.top_k, request.seed),
        stops=checked_stops(tuple(request.stop)),
        ignore_eos=request.ignore_eos,
        identity=checked_pin(request.identity, "identity"),
    )
