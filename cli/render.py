"""Messages as JSON and as lines for a terminal."""

from __future__ import annotations

import json
from typing import Any

import click
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from rowlock.v1 import identity_pb2, owner_pb2

SHORT = 12


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False))


def to_json(message: Message) -> dict[str, Any]:
    """A message as JSON values: every field present, numbers as numbers, enums without prefix."""
    return {field.name: _field(message, field) for field in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(value)
    if field.is_repeated:
        return [_value(item, field) for item in value]
    if field.message_type is not None and not message.HasField(field.name):
        return None
    return _value(value, field)


def _value(value: Any, field: Any) -> Any:
    if field.enum_type is not None:
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        name = field.enum_type.values_by_number[value].name.removeprefix(prefix)
        return None if name == "UNSPECIFIED" else name
    if isinstance(value, Timestamp):
        return value.ToMicroseconds() / 1e6
    if isinstance(value, Message):
        return to_json(value)
    return value


def short(identity: identity_pb2.Identity) -> str:
    """First characters of an identity's digest."""
    return identity.digest[:SHORT] or "none"


def size(nbytes: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "KB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def state_name(state: owner_pb2.TransitionState.ValueType) -> str:
    return owner_pb2.TransitionState.Name(state).removeprefix("TRANSITION_STATE_")


def level_name(level: owner_pb2.Level.ValueType) -> str:
    return owner_pb2.Level.Name(level).removeprefix("LEVEL_")


def plan_lines(plan: owner_pb2.Plan) -> list[str]:
    """A plan for a person."""
    lines = [
        f"{level_name(plan.level)}: {plan.why}",
        f"  from       {short(getattr(plan, 'from'))} (generation {plan.generation})",
        f"  to         {short(plan.to)}",
    ]
    if plan.level == owner_pb2.LEVEL_B2:
        lines += [
            f"  writes     at most {plan.rows_max} rows, {size(plan.bytes_max)}, in {plan.groups} groups",
            f"  reads back {size(plan.parent_bytes)} of touched allocations",
            f"  undo       {owner_pb2.UndoStore.Name(plan.undo).removeprefix('UNDO_STORE_').lower()}",
        ]
        lines += [
            f"    {item.tensor}: {item.groups} groups, at most {item.rows_max} rows" for item in plan.changes[:10]
        ]
        if len(plan.changes) > 10:
            lines.append(f"    and {len(plan.changes) - 10} more tensors")
    lines += [f"  blocker    {item.reason}: {item.tensor or 'model'}: {item.detail}" for item in plan.blockers[:10]]
    if plan.level != owner_pb2.LEVEL_NOOP:
        lines.append(f"  needs      {size(plan.memory_bytes)} of memory, {size(plan.disk_bytes)} of disk")
        lines.append(f"  pause      about {plan.predicted_pause_ms:.1f} ms")
    if plan.irreversible:
        lines.append("  IRREVERSIBLE: the old identity could not be rebuilt once it is closed")
    lines.append(f"  digest     {plan.digest}")
    return lines


def record_lines(record: owner_pb2.TransitionRecord) -> list[str]:
    """A finished transition for a person."""
    lines = [
        f"{state_name(record.state)}: {record.kind} {record.id}",
        f"  {level_name(record.level)} to {record.target}",
        f"  identity   {short(getattr(record, 'from'))} -> {short(record.to)}",
        f"  generation {record.generation_from} -> {record.generation or 'none taken'}",
        f"  wrote      {record.rows_written} rows, {size(record.bytes_written)}"
        + (f"; {size(record.unread_bytes)} not read back before the publish" if record.unread_bytes else ""),
        f"  read back  {size(record.bytes_read_back)}",
        f"  drain      {record.drain_ms:.1f} ms",
        f"  exclusive  {record.exclusive_ms:.1f} ms",
        f"  total      {record.total_ms:.1f} ms"
        + (f" ({', '.join(f'{phase.name} {phase.ms:.1f}' for phase in record.phases)})" if record.phases else ""),
    ]
    if record.reason:
        lines.append(f"  reason     {record.reason}: {record.message}")
    return lines


def source_lines(source: owner_pb2.Source) -> list[str]:
    """Who computes prompts for the owner, as people read it."""
    process = f", pid {source.pid}" if source.pid else ""
    reason = f": {source.reason}" if source.reason else ""
    imported = f"{source.prompts_imported} imported ({source.spans_imported} spans, {size(source.bytes_imported)})"
    prompts = (
        f"    prompts  {imported}, "
        f"{source.prompts_live} live, {source.prompts_failed} failed, {source.local_fallbacks} computed here instead"
    )
    return [f"  source     {source.state}{process}, {source.mode}, {source.restarts} restarts{reason}", prompts]
