"""``rowlock.v1.OwnerService``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from blake3 import blake3

from rowlock.bindings import plan as planning
from rowlock.bindings.plan import Require
from rowlock.daemon.api.errors import abort
from rowlock.daemon.api.messages import (
    describe_message,
    event_message,
    owner_message,
    plan_message,
    record_message,
    verify_message,
)
from rowlock.daemon.owner.owner import Admission, Owner
from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.owner.states import TERMINAL
from rowlock.daemon.owner.target import Target
from rowlock.journal.journal import TransitionRow
from rowlock.v1 import owner_pb2, owner_pb2_grpc
from rowlock.v1.errors import OwnerError, Reason

Context = grpc.aio.ServicerContext[Any, Any]

_REQUIRE = {
    owner_pb2.REQUIRE_UNSPECIFIED: Require.AUTO,
    owner_pb2.REQUIRE_AUTO: Require.AUTO,
    owner_pb2.REQUIRE_B2: Require.B2,
    owner_pb2.REQUIRE_B1: Require.B1,
}
_LIST_DEFAULT, _LIST_MAX = 50, 1000


class OwnerService(owner_pb2_grpc.OwnerServiceServicer):
    """See ``proto/rowlock/v1/owner.proto``."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    async def GetOwner(  # noqa: N802 - gRPC's names
        self, request: owner_pb2.GetOwnerRequest, context: Context
    ) -> owner_pb2.GetOwnerResponse:
        return owner_pb2.GetOwnerResponse(owner=owner_message(self._owner.view))

    async def Describe(  # noqa: N802
        self, request: owner_pb2.DescribeRequest, context: Context
    ) -> owner_pb2.DescribeResponse:
        return describe_message(self._owner.view)

    async def Plan(self, request: owner_pb2.PlanRequest, context: Context) -> owner_pb2.PlanResponse:  # noqa: N802
        try:
            plan, target = await self._plan(request.target, request.require)
        except OwnerError as error:
            await abort(context, error)
        target.close()
        return owner_pb2.PlanResponse(plan=plan_message(plan))

    async def Transition(  # noqa: N802
        self, request: owner_pb2.TransitionRequest, context: Context
    ) -> AsyncIterator[owner_pb2.TransitionResponse]:
        try:
            transition = await self._begin_transition(request)
        except OwnerError as error:
            await abort(context, error)
        async for event in self._follow(transition):
            yield owner_pb2.TransitionResponse(event=event)

    async def Rollback(  # noqa: N802
        self, request: owner_pb2.RollbackRequest, context: Context
    ) -> AsyncIterator[owner_pb2.RollbackResponse]:
        try:
            transition = await self._begin_rollback(request)
        except OwnerError as error:
            await abort(context, error)
        async for event in self._follow(transition):
            yield owner_pb2.RollbackResponse(event=event)

    async def GetTransition(  # noqa: N802
        self, request: owner_pb2.GetTransitionRequest, context: Context
    ) -> owner_pb2.GetTransitionResponse:
        row = await asyncio.to_thread(self._owner.journal.find, request.id)
        if row is None:
            await abort(context, OwnerError(Reason.NOT_FOUND, f"id: there is no transition {request.id!r}"))
        events = await asyncio.to_thread(self._owner.journal.events, row.id)
        return owner_pb2.GetTransitionResponse(
            record=record_message(TransitionRecord.from_json(row.record)),
            events=[event_message(row.id, event, None) for event in events],
        )

    async def ListTransitions(  # noqa: N802
        self, request: owner_pb2.ListTransitionsRequest, context: Context
    ) -> owner_pb2.ListTransitionsResponse:
        if request.limit > _LIST_MAX:
            await abort(context, OwnerError(Reason.ARGUMENT_INVALID, f"limit: at most {_LIST_MAX}"))
        rows = await asyncio.to_thread(self._owner.journal.transitions, request.limit or _LIST_DEFAULT, request.before)
        return owner_pb2.ListTransitionsResponse(
            records=[record_message(TransitionRecord.from_json(row.record)) for row in rows]
        )

    async def Verify(self, request: owner_pb2.VerifyRequest, context: Context) -> owner_pb2.VerifyResponse:  # noqa: N802
        try:
            return verify_message(await asyncio.wrap_future(self._owner.verify()))
        except OwnerError as error:
            await abort(context, error)

    async def _plan(self, target: str, require: owner_pb2.Require.ValueType) -> tuple[planning.Plan, Target]:
        if not target or not Path(target).is_absolute():
            raise OwnerError(Reason.ARGUMENT_INVALID, f"target: {target!r} is not an absolute path")
        if require not in _REQUIRE:
            raise OwnerError(Reason.ARGUMENT_INVALID, f"require: {require} is not a level")
        return await asyncio.to_thread(
            self._owner.planner.transition, self._owner.view.resident, Path(target), _REQUIRE[require]
        )

    async def _begin_transition(self, request: owner_pb2.TransitionRequest) -> str:
        digest = _request_digest("transition", request.target, request.require, request.plan_digest)
        known = await self._known(request.request_id, digest)
        if known is not None:
            return known
        plan, target = await self._plan(request.target, request.require)
        if request.plan_digest and request.plan_digest != plan.digest:
            target.close()
            raise OwnerError(
                Reason.PLAN_CHANGED,
                f"plan_digest: the owner now plans {plan.digest[:12]}, not {request.plan_digest[:12]}",
            )
        admission = Admission(
            plan,
            target,
            "transition",
            request.request_id,
            digest,
            allow_irreversible=request.allow_irreversible,
        )
        return await asyncio.wrap_future(self._owner.admit(admission))

    async def _begin_rollback(self, request: owner_pb2.RollbackRequest) -> str:
        digest = _request_digest("rollback", request.generation)
        known = await self._known(request.request_id, digest)
        if known is not None:
            return known
        resident = self._owner.view.resident
        if request.generation and resident is not None and request.generation != resident.generation:
            raise OwnerError(
                Reason.GENERATION_STALE,
                f"generation: {request.generation} was expected to be resident, {resident.generation} is",
            )
        plan, target = await asyncio.to_thread(self._owner.planner.rollback, resident)
        admission = Admission(plan, target, "rollback", request.request_id, digest)
        return await asyncio.wrap_future(self._owner.admit(admission))

    async def _known(self, request_id: str, digest: str) -> str | None:
        """The transition that this request id began before, if any."""
        if not request_id:
            return None
        row = await asyncio.to_thread(self._owner.journal.find, request_id)
        if row is not None and row.request_digest != digest:
            raise OwnerError(Reason.REQUEST_ID_REUSED, f"request_id: {request_id!r} began another request before")
        return row.id if row else None

    async def _follow(self, transition: str) -> AsyncIterator[owner_pb2.TransitionEvent]:
        """Every event of a transition, from the journal: those before now, then those to come."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def listener() -> None:
            loop.call_soon_threadsafe(news.set)

        self._owner.followers.add(transition, listener)
        try:
            seen = 0
            while True:
                news.clear()
                live = self._owner.is_live(transition)
                row, events = await asyncio.to_thread(self._read, transition)
                for event in events[seen:]:
                    last = event.state in TERMINAL
                    if last and live:
                        break
                    seen += 1
                    record = TransitionRecord.from_json(row.record) if last else None
                    yield event_message(transition, event, record)
                    if last:
                        return
                if not live and seen == len(events):
                    return
                await news.wait()
        finally:
            self._owner.followers.remove(transition, listener)

    def _read(self, transition: str) -> tuple[TransitionRow, list[Any]]:
        row = self._owner.journal.find(transition)
        assert row is not None
        return row, self._owner.journal.events(transition)


def _request_digest(*parts: object) -> str:
    return blake3(json.dumps(parts).encode()).hexdigest()
