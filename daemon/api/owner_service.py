"""``rowlock.v1.OwnerService``."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor, Future
from typing import Any, Final, TypeAlias, TypeVar

import grpc

from rowlock.bindings import plan as planning
from rowlock.bindings.plan import Require
from rowlock.daemon.api.errors import refusals
from rowlock.daemon.api.following import follow
from rowlock.daemon.api.messages import (
    chained_message,
    counters_message,
    describe_message,
    event_message,
    owner_message,
    plan_message,
    record_message,
    verify_message,
)
from rowlock.daemon.api.requests import (
    check_request_id,
    options_of,
    request_digest,
    require_of,
    target_path,
    variant_of,
)
from rowlock.daemon.owner.admission import Admission
from rowlock.daemon.owner.options import Options
from rowlock.daemon.owner.owner import Owner
from rowlock.daemon.owner.pushing import PushedRows
from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.owner.target import Target
from rowlock.daemon.owner.verification import Sample
from rowlock.journal.rows import TransitionRow
from rowlock.v1 import owner_pb2, owner_pb2_grpc
from rowlock.v1.errors import OwnerError, Reason

T = TypeVar("T")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Events = AsyncIterator[owner_pb2.TransitionEvent]

_LIST_DEFAULT, _LIST_MAX = 50, 1000

SEED_BOUND: Final = 2**32
"""Seeds that the owner chooses are below: short enough to be typed again."""


class OwnerService(owner_pb2_grpc.OwnerServiceServicer):
    """See ``proto/rowlock/v1/owner.proto``.

    Args:
        owner: the core.
        options: of transitions, where callers leave them open.
        push_bytes_max: rows that one push may carry.
        planners: threads that read and digest targets.
        release: ends the process after a quarantine was released.

    """

    def __init__(
        self, owner: Owner, options: Options, push_bytes_max: int, planners: Executor, release: Callable[[], None]
    ) -> None:
        self._owner = owner
        self._options = options
        self._push_bytes_max = push_bytes_max
        self._planners = planners
        self._release = release

    # Reads: from the view and the journal; they never wait for a transition.

    async def GetOwner(  # noqa: N802 - gRPC's names
        self, request: owner_pb2.GetOwnerRequest, context: Context
    ) -> owner_pb2.GetOwnerResponse:
        return owner_pb2.GetOwnerResponse(owner=owner_message(self._owner.view))

    async def WatchOwner(  # noqa: N802
        self, request: owner_pb2.WatchOwnerRequest, context: Context
    ) -> AsyncIterator[owner_pb2.WatchOwnerResponse]:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def observer() -> None:
            loop.call_soon_threadsafe(changed.set)

        self._owner.observe(observer)
        try:
            while True:
                yield owner_pb2.WatchOwnerResponse(owner=owner_message(self._owner.view))
                await changed.wait()
                changed.clear()
        finally:
            self._owner.forget(observer)

    async def Describe(  # noqa: N802
        self, request: owner_pb2.DescribeRequest, context: Context
    ) -> owner_pb2.DescribeResponse:
        return describe_message(self._owner.view)

    async def GetTransition(  # noqa: N802
        self, request: owner_pb2.GetTransitionRequest, context: Context
    ) -> owner_pb2.GetTransitionResponse:
        async with refusals(context):
            row = await self._find(request.id)
            events = await asyncio.to_thread(self._owner.journal.events, row.id)
            writes = await asyncio.to_thread(self._owner.journal.writes, row.id)
            return owner_pb2.GetTransitionResponse(
                record=record_message(TransitionRecord.from_json(row.record), writes),
                events=[event_message(row.id, event, None) for event in events],
            )

    async def ListTransitions(  # noqa: N802
        self, request: owner_pb2.ListTransitionsRequest, context: Context
    ) -> owner_pb2.ListTransitionsResponse:
        async with refusals(context):
            if request.limit > _LIST_MAX:
                raise OwnerError(Reason.ARGUMENT_INVALID, f"limit: at most {_LIST_MAX}")
            rows = await asyncio.to_thread(
                self._owner.journal.transitions, request.limit or _LIST_DEFAULT, request.before
            )
            return owner_pb2.ListTransitionsResponse(
                records=[record_message(TransitionRecord.from_json(row.record)) for row in rows]
            )

    async def GetHistoryHead(  # noqa: N802
        self, request: owner_pb2.GetHistoryHeadRequest, context: Context
    ) -> owner_pb2.GetHistoryHeadResponse:
        async with refusals(context):
            head = await asyncio.to_thread(self._owner.journal.head)
            return owner_pb2.GetHistoryHeadResponse(head=str(head), public_key=self._owner.journal.public_key)

    async def ReadHistory(  # noqa: N802
        self, request: owner_pb2.ReadHistoryRequest, context: Context
    ) -> AsyncIterator[owner_pb2.ReadHistoryResponse]:
        async with refusals(context):
            after, last = 0, False
            while not last:
                page = await asyncio.to_thread(self._owner.journal.chain_page, after)
                for bound in page.events:
                    yield chained_message(bound)
                    after = bound.event.position
                last = page.last
            yield owner_pb2.ReadHistoryResponse(findings=page.findings)

    async def WatchTransition(  # noqa: N802
        self, request: owner_pb2.WatchTransitionRequest, context: Context
    ) -> AsyncIterator[owner_pb2.WatchTransitionResponse]:
        async with refusals(context):
            row = await self._find(request.id)
            async for event in follow(self._owner, row.id, request.after_sequence):
                yield owner_pb2.WatchTransitionResponse(event=event)

    async def Plan(self, request: owner_pb2.PlanRequest, context: Context) -> owner_pb2.PlanResponse:  # noqa: N802
        async with refusals(context):
            options = options_of(request.options, self._options)
            plan, target = await self._plan(request.target, require_of(request.require), options)
            target.close()
            return owner_pb2.PlanResponse(plan=plan_message(plan))

    async def Verify(self, request: owner_pb2.VerifyRequest, context: Context) -> owner_pb2.VerifyResponse:  # noqa: N802
        async with refusals(context):
            seed = request.seed or (secrets.randbelow(SEED_BOUND - 1) + 1 if request.sample else 0)
            sample = Sample(request.sample, seed) if request.sample else None
            return verify_message(await asyncio.wrap_future(self._owner.verify(sample)), seed)

    async def PrepareVariant(  # noqa: N802
        self, request: owner_pb2.PrepareVariantRequest, context: Context
    ) -> owner_pb2.PrepareVariantResponse:
        async with refusals(context):
            variant = variant_of(request)
            cost = await asyncio.wrap_future(self._owner.prepare_variant(variant))
            return owner_pb2.PrepareVariantResponse(counters=counters_message(vars(cost)))

    # Mutations: durable once the first event is sent.

    async def Transition(  # noqa: N802
        self, request: owner_pb2.TransitionRequest, context: Context
    ) -> AsyncIterator[owner_pb2.TransitionResponse]:
        async with refusals(context):
            async for event in self._begin("transition", request, self._transition(request)):
                yield owner_pb2.TransitionResponse(event=event)

    async def Rollback(  # noqa: N802
        self, request: owner_pb2.RollbackRequest, context: Context
    ) -> AsyncIterator[owner_pb2.RollbackResponse]:
        async with refusals(context):
            async for event in self._begin("rollback", request, self._rollback(request)):
                yield owner_pb2.RollbackResponse(event=event)

    async def Unload(  # noqa: N802
        self, request: owner_pb2.UnloadRequest, context: Context
    ) -> AsyncIterator[owner_pb2.UnloadResponse]:
        async with refusals(context):
            async for event in self._begin("unload", request, self._unload(request)):
                yield owner_pb2.UnloadResponse(event=event)

    async def PushRows(  # noqa: N802
        self, request_iterator: AsyncIterator[owner_pb2.PushRowsRequest], context: Context
    ) -> AsyncIterator[owner_pb2.PushRowsResponse]:
        async with refusals(context):
            first = await anext(aiter(request_iterator), None)
            if first is None or first.WhichOneof("part") != "header":
                raise OwnerError(Reason.ARGUMENT_INVALID, "header: must be the first message of a push")
            header = first.header
            async for event in self._begin("push", header, self._push(header, request_iterator)):
                yield owner_pb2.PushRowsResponse(event=event)

    async def Cancel(self, request: owner_pb2.CancelRequest, context: Context) -> owner_pb2.CancelResponse:  # noqa: N802
        async with refusals(context):
            row = await self._find(request.transition)
            await asyncio.wrap_future(self._owner.cancel(row.id))
            async for event in follow(self._owner, row.id):
                last = event
            if last.state != owner_pb2.TRANSITION_STATE_CANCELLED:
                raise OwnerError(Reason.NOT_CANCELLABLE, f"transition {row.id} had ended already")
            return owner_pb2.CancelResponse(record=last.record)

    async def ReleaseQuarantine(  # noqa: N802
        self, request: owner_pb2.ReleaseQuarantineRequest, context: Context
    ) -> owner_pb2.ReleaseQuarantineResponse:
        async with refusals(context):
            for field in ("who", "why"):
                if not getattr(request, field).strip():
                    raise OwnerError(Reason.ARGUMENT_INVALID, f"{field}: is empty")
            await asyncio.to_thread(self._owner.release_quarantine, request.who, request.why)
            self._release()
            return owner_pb2.ReleaseQuarantineResponse()

    async def _transition(self, request: owner_pb2.TransitionRequest) -> Admission:
        options = options_of(request.options, self._options)
        plan, target = await self._plan(request.target, require_of(request.require), options)
        if request.plan_digest and request.plan_digest != plan.digest:
            target.close()
            raise OwnerError(
                Reason.PLAN_CHANGED,
                f"plan_digest: the owner now plans {plan.digest[:12]}, not {request.plan_digest[:12]}",
            )
        return Admission("transition", plan, target, options, etag=request.etag)

    async def _rollback(self, request: owner_pb2.RollbackRequest) -> Admission:
        options, resident = options_of(request.options, self._options), self._owner.view.resident
        if request.generation and resident is not None and request.generation != resident.generation:
            raise OwnerError(
                Reason.GENERATION_STALE,
                f"generation: {request.generation} was expected to be resident, {resident.generation} is",
            )
        plan, target = await self._read_target(self._owner.planner.rollback, resident, request.to, options)
        return Admission("rollback", plan, target, options, etag=request.etag)

    async def _unload(self, request: owner_pb2.UnloadRequest) -> Admission:
        return Admission("unload", None, None, options_of(request.options, self._options), etag=request.etag)

    async def _push(
        self, header: owner_pb2.PushHeader, messages: AsyncIterator[owner_pb2.PushRowsRequest]
    ) -> Admission:
        options, resident = options_of(header.options, self._options), self._owner.view.resident
        if resident is None:
            raise OwnerError(Reason.EMPTY, "nothing is resident whose rows could be replaced")
        if header.generation != resident.generation:
            raise OwnerError(
                Reason.GENERATION_STALE,
                f"generation: {header.generation} was expected to be resident, {resident.generation} is",
            )
        tensors = {name: item.tensor for name, item in resident.model.layout.placements.items()}
        rows = PushedRows(tensors, self._push_bytes_max)
        async for message in messages:
            if message.WhichOneof("part") != "rows":
                raise OwnerError(Reason.ARGUMENT_INVALID, "rows: only rows may follow the header")
            rows.add(message.rows.tensor, message.rows.first_row, message.rows.data)
        target = await asyncio.wrap_future(self._owner.target_of_push(rows))
        if header.weights and header.weights != target.model.identity.weights:
            raise OwnerError(
                Reason.VERIFY_MISMATCH,
                f"weights: the rows lead to root {target.model.identity.weights[:12]}, not {header.weights[:12]}",
            )
        plan = await asyncio.wrap_future(
            self._planners.submit(self._owner.planner.plan, resident, target, Require.B2, options)
        )
        return Admission("push", plan, target, options, etag=header.etag)

    async def _begin(self, kind: str, request: Any, admission: Any) -> Events:
        """Admit what a request asks for, or find what the same request began before; then follow it."""
        try:
            check_request_id(request.request_id)
            digest = request_digest(kind, request)
            transition = await self._known(request.request_id, digest)
            if transition is None:
                transition = await self._admit(await admission, request.request_id, digest)
        finally:
            admission.close()
        async for event in follow(self._owner, transition):
            yield event

    async def _admit(self, admission: Admission, request_id: str, digest: str) -> str:
        named = Admission(
            admission.kind, admission.plan, admission.target, admission.options, request_id, digest, admission.etag
        )
        try:
            return await asyncio.wrap_future(self._owner.admit(named))
        except OwnerError:
            # the same request may have come twice at once, and the other one was first
            known = await self._known(request_id, digest)
            if known is not None:
                return known
            raise

    async def _known(self, request_id: str, digest: str) -> str | None:
        """The transition that this request id began before, if any."""
        if not request_id:
            return None
        row = await asyncio.to_thread(self._owner.journal.find, request_id)
        if row is not None and row.request_digest != digest:
            raise OwnerError(Reason.REQUEST_ID_REUSED, f"request_id: {request_id!r} began another request before")
        return row.id if row else None

    async def _find(self, transition: str) -> TransitionRow:
        row = await asyncio.to_thread(self._owner.journal.find, transition)
        if row is None:
            raise OwnerError(Reason.NOT_FOUND, f"id: there is no transition {transition[:200]!r}")
        return row

    async def _plan(self, target: str, require: Require, options: Options) -> tuple[planning.Plan, Target]:
        return await self._read_target(
            self._owner.planner.transition, self._owner.view.resident, target_path(target), require, options
        )

    async def _read_target(
        self, read: Callable[..., tuple[planning.Plan, Target]], *arguments: object
    ) -> tuple[planning.Plan, Target]:
        """Read a target on another thread; it is closed if nobody waits for it any more."""
        future = self._planners.submit(read, *arguments)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(_close_unwanted)
            raise


def _close_unwanted(future: Future[tuple[planning.Plan, Target]]) -> None:
    if not future.cancelled() and future.exception() is None:
        future.result()[1].close()
