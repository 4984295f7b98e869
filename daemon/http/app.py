"""The routes, and those that only read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import rowlock
from rowlock.daemon.http.forms import ChatForm, CompletionForm
from rowlock.daemon.http.generating import GENERATION_HEADER, IDENTITY_HEADER, Generating, Service
from rowlock.daemon.http.parameters import chat_call, completion_call
from rowlock.daemon.http.problems import HttpError, problem_of
from rowlock.daemon.owner.owner import Owner

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


@dataclass
class Probes:
    """What only reads: models, probes, version, metrics.

    Attributes:
        stopping: the daemon ends; it is ready for nothing any more.

    """

    owner: Owner
    registry: CollectorRegistry
    model: str
    created: int
    stopping: bool = False

    async def health(self, _request: Request) -> Response:
        """The process lives, quarantined or not."""
        return JSONResponse({"status": "alive", "state": self.owner.view.state})

    async def ready(self, _request: Request) -> Response:
        """Whether requests are answered now; a B2 does not change that."""
        view = self.owner.view
        if self.stopping:
            return JSONResponse({"status": "stopping"}, 503)
        if not view.serving:
            reason = view.quarantined or view.reason
            return JSONResponse({"status": "not ready", "state": view.state, "reason": reason}, 503)
        return JSONResponse({"status": "ready", "state": view.state})

    async def version(self, _request: Request) -> Response:
        facts = self.owner.view.facts
        return JSONResponse(
            {
                "version": rowlock.__version__,
                "device": facts.device,
                "binding": facts.binding,
                "versions": dict(facts.versions),
            }
        )

    async def models(self, _request: Request) -> Response:
        models = self._models()
        return JSONResponse({"object": "list", "data": models}, headers=self._identity())

    async def one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for model in self._models():
            if model["id"] == name:
                return JSONResponse(model, headers=self._identity())
        raise HttpError(404, f"there is no model {name[:80]!r}", param="model", code="model_not_found")

    async def metrics(self, _request: Request) -> Response:
        text = await run_in_threadpool(generate_latest, self.registry)  # it reads the journal
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _models(self) -> list[dict[str, Any]]:
        """The resident model, if there is one."""
        resident = self.owner.view.resident
        if resident is None:
            return []
        return [
            {
                "id": self.model,
                "object": "model",
                "created": self.created,
                "owned_by": "rowlock",
                "identity": resident.model.identity.digest,
                "generation": resident.generation,
                "checkpoint": resident.model.checkpoint,
                "context_tokens": resident.config.context,
            }
        ]

    def _identity(self) -> dict[str, str]:
        resident = self.owner.view.resident
        if resident is None:
            return {}
        return {IDENTITY_HEADER: resident.model.identity.digest, GENERATION_HEADER: str(resident.generation)}


def build_app(service: Service, probes: Probes) -> Starlette:
    """All routes. Every failure is OpenAI's error object."""

    def reading(endpoint: Endpoint) -> Endpoint:
        async def guarded(request: Request) -> Response:
            try:
                return await endpoint(request)
            except Exception as error:  # noqa: BLE001 - the edge of a request
                service.log("http.failed", path=request.url.path, error=repr(error), exc_info=error)
                return problem_of(error).response()

        return guarded

    async def refuse(_request: Request, error: Exception) -> Response:
        return problem_of(error).response()

    return Starlette(
        routes=[
            Route("/v1/models", reading(probes.models)),
            Route("/v1/models/{name:path}", reading(probes.one_model)),
            Route("/v1/completions", Generating(service, completion_call, CompletionForm()), methods=["POST"]),
            Route("/v1/chat/completions", Generating(service, chat_call, ChatForm()), methods=["POST"]),
            Route("/health", reading(probes.health)),
            Route("/ready", reading(probes.ready)),
            Route("/version", reading(probes.version)),
            Route("/metrics", reading(probes.metrics)),
        ],
        exception_handlers={HTTPException: refuse, HttpError: refuse},
    )
