"""From the core's values to the messages of ``rowlock.v1``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.timestamp_pb2 import Timestamp

import rowlock
from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.device import CacheUse
from rowlock.bindings.plan import Plan
from rowlock.daemon.owner.prefilling import SourceView
from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.owner.rows import Drift
from rowlock.daemon.owner.verification import Verification
from rowlock.daemon.owner.view import OwnerView
from rowlock.journal.chain_table import Bound
from rowlock.journal.rows import Event
from rowlock.v1 import identity_pb2, owner_pb2


def identity_message(identity: Identity | None) -> identity_pb2.Identity | None:
    if identity is None:
        return None
    return identity_pb2.Identity(
        program=identity.program, assets=identity.assets, weights=identity.weights, digest=identity.digest
    )


def owner_message(view: OwnerView) -> owner_pb2.Owner:
    resident = view.resident
    return owner_pb2.Owner(
        device=view.facts.device,
        state=owner_pb2.OwnerState.Value(f"OWNER_STATE_{view.state.value}"),
        identity=identity_message(resident.model.identity) if resident else None,
        generation=resident.generation if resident else 0,
        checkpoint=resident.model.checkpoint if resident else "",
        transition=view.transition,
        reason=view.quarantined or ("" if resident else view.reason),
        epoch=view.epoch,
        requests_active=len(view.leases),
        requests_waiting=view.requests_waiting,
        tokens=view.tokens,
        etag=view.etag,
        leases=[
            owner_pb2.LeaseInfo(
                request=item.request, generation=item.generation, held_s=round(item.held_s, 3), tokens=item.tokens
            )
            for item in view.leases
        ],
        drift=drift_messages(view.drift),
        source=source_message(view.source),
    )


def source_message(source: SourceView | None) -> owner_pb2.Source | None:
    if source is None:
        return None
    counters = source.counters
    return owner_pb2.Source(
        state=source.state,
        name=source.name,
        pid=source.pid,
        restarts=source.restarts,
        reason=source.reason,
        mode=source.mode,
        prompts_live=source.live,
        prompts_imported=counters.remote,
        prompts_failed=counters.failed,
        local_fallbacks=counters.fallbacks,
        spans_imported=counters.spans,
        bytes_imported=counters.bytes,
        frames_late=counters.late,
        prompts_quarantined=counters.quarantined,
    )


def describe_message(view: OwnerView) -> owner_pb2.DescribeResponse:
    resident = view.resident
    message = owner_pb2.DescribeResponse(
        owner=owner_message(view),
        version=rowlock.__version__,
        binding=view.facts.binding,
        versions=dict(view.facts.versions),
        readback=view.facts.readback,
        execution=view.facts.execution,
        logical_device=view.facts.logical,
        test_options=view.facts.test_options,
        counters=counters_message(vars(view.counters)),
        scrubbed=timestamp(view.scrubbed) if view.scrubbed else None,
        cache=cache_message(view.cache) if view.cache.groups else None,
        served=owner_pb2.Served(**vars(view.served)),
    )
    if resident is not None:
        layout = resident.model.layout
        message.resident_bytes = layout.nbytes
        message.context_tokens = resident.config.context
        message.architecture = resident.config.family
        message.programs.update(resident.runtime.programs)
        for name, parent in layout.parents.items():
            message.parents.append(
                owner_pb2.Parent(
                    name=name,
                    dtype=parent.dtype,
                    rows=parent.rows,
                    row_bytes=parent.row_bytes,
                    allocation=resident.runtime.allocations[name].id,
                    tensors=[
                        owner_pb2.Placement(
                            tensor=item.tensor.name,
                            first_row=item.first_row,
                            rows=item.tensor.rows,
                            blocked=item.blocked.value if item.blocked else "",
                        )
                        for item in layout.in_parent(name)
                    ],
                )
            )
    return message


def cache_message(use: CacheUse) -> owner_pb2.Cache:
    groups = [owner_pb2.CacheGroup(in_use=item.in_use, **vars(item)) for item in use.groups]
    return owner_pb2.Cache(page_tokens=use.page_tokens, bytes=use.nbytes, groups=groups, hit_tokens=use.hit_tokens)


def counters_message(counters: Mapping[str, int]) -> owner_pb2.Counters:
    return owner_pb2.Counters(**counters)


def plan_message(plan: Plan) -> owner_pb2.Plan:
    return owner_pb2.Plan(
        level=owner_pb2.Level.Value(f"LEVEL_{plan.level.value}"),
        why=plan.why,
        target=plan.target,
        to=identity_message(plan.to_identity),
        generation=plan.generation,
        changes=[
            owner_pb2.TensorChange(
                tensor=item.tensor,
                parent=item.parent,
                groups=len(item.groups),
                rows_max=item.rows_max,
                bytes_max=item.bytes_max,
            )
            for item in plan.changes
        ],
        blockers=[
            owner_pb2.Blocker(tensor=item.tensor, reason=item.reason.value, detail=item.detail)
            for item in plan.blockers
        ],
        groups=plan.groups,
        rows_max=plan.rows_max,
        bytes_max=plan.bytes_max,
        parent_bytes=plan.parent_bytes,
        memory_bytes=plan.memory_bytes,
        disk_bytes=plan.disk_bytes,
        predicted_pause_ms=plan.predicted_pause_ms,
        irreversible=plan.irreversible,
        undo=owner_pb2.UndoStore.Value(f"UNDO_STORE_{plan.undo.value}"),
        assets_changed=plan.assets_changed,
        digest=plan.digest,
        verify=owner_pb2.VerifyMode.Value(f"VERIFY_MODE_{plan.verify.value}"),
        target_check=owner_pb2.TargetCheck.Value(f"TARGET_CHECK_{plan.target_check.value}"),
        unread_bytes=plan.unread_bytes,
        by_digest=plan.by_digest,
        **_from_identity(plan.from_identity),
    )


def event_message(
    transition: str, event: Event, record: owner_pb2.TransitionRecord | None
) -> owner_pb2.TransitionEvent:
    return owner_pb2.TransitionEvent(
        transition=transition,
        sequence=event.sequence,
        state=owner_pb2.TransitionState.Value(f"TRANSITION_STATE_{event.state}"),
        time=timestamp(event.time),
        message=event.message,
        record=record,
    )


def chained_message(bound: Bound) -> owner_pb2.ReadHistoryResponse:
    return owner_pb2.ReadHistoryResponse(event=owner_pb2.ChainedEvent(**vars(bound.event)), rows=bound.rows)


WRITES_MAX: Final = 1000
"""Runs of rows in one message; the journal has all of them."""


def record_message(record: TransitionRecord, writes: str = "[]") -> owner_pb2.TransitionRecord:
    """A record; ``writes`` is the journal's text of the exact rows."""
    return owner_pb2.TransitionRecord(
        id=record.id,
        request_id=record.request_id,
        state=owner_pb2.TransitionState.Value(f"TRANSITION_STATE_{record.state}"),
        level=owner_pb2.Level.Value(f"LEVEL_{record.level}"),
        kind=record.kind,
        target=record.target,
        to=identity_message(record.to_identity),
        generation_from=record.generation_from,
        generation=record.generation,
        reason=record.reason,
        message=record.message,
        rows_written=record.rows_written,
        bytes_written=record.bytes_written,
        bytes_read_back=record.bytes_read_back,
        groups=record.groups,
        undo=owner_pb2.UndoStore.Value(f"UNDO_STORE_{record.undo}"),
        counters=counters_message(record.counters),
        phases=[owner_pb2.Phase(name=name, ms=ms) for name, ms in record.phases.items()],
        drain_ms=record.drain_ms,
        exclusive_ms=record.exclusive_ms,
        blocked_ms=record.blocked_ms,
        total_ms=record.total_ms,
        created=timestamp(record.created),
        ended=timestamp(record.ended) if record.ended else None,
        writes=[_row_range(*item) for item in json.loads(writes)[:WRITES_MAX]],
        write_runs=record.write_runs,
        verify=owner_pb2.VerifyMode.Value(f"VERIFY_MODE_{record.verify or 'UNSPECIFIED'}"),
        target_check=owner_pb2.TargetCheck.Value(f"TARGET_CHECK_{record.target_check or 'UNSPECIFIED'}"),
        unread_bytes=record.unread_bytes,
        scrub=record.scrub,
        readback=record.readback,
        plan_digest=record.plan.get("digest", ""),
        **_from_identity(record.from_identity),
    )


def _row_range(
    parent: str, allocation: str, first_row: int, rows: int, offset_bytes: int, nbytes: int
) -> owner_pb2.RowRange:
    return owner_pb2.RowRange(
        parent=parent, allocation=allocation, first_row=first_row, rows=rows, offset_bytes=offset_bytes, bytes=nbytes
    )


def drift_messages(drift: Drift) -> list[owner_pb2.Drift]:
    return [owner_pb2.Drift(tensor=tensor, first_row=first, rows=rows) for tensor, first, rows in drift]


def verify_message(result: Verification, seed: int) -> owner_pb2.VerifyResponse:
    return owner_pb2.VerifyResponse(
        ok=result.ok,
        identity=identity_message(result.identity),
        generation=result.generation,
        weights=result.weights,
        bytes_read_back=result.bytes_read_back,
        total_ms=result.total_ms,
        drift=drift_messages(result.drift),
        parents=result.parents,
        seed=seed,
    )


def timestamp(seconds: float) -> Timestamp:
    message = Timestamp()
    message.FromMicroseconds(round(seconds * 1e6))
    return message


def _from_identity(identity: Identity | None) -> dict[str, Any]:
    """``from`` is a Python keyword, so the field is set by name."""
    return {"from": identity_message(identity)} if identity else {}
