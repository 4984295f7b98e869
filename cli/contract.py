"""The JSON forms of the five operations, as field -> kind; what ``--json`` prints follows them."""

from __future__ import annotations

from typing import Any, Final

from rowlock.v1 import identity_pb2, inference_pb2, owner_pb2

OPERATIONS: Final[dict[str, Any]] = {
    "describe": owner_pb2.DescribeResponse,
    "identity": identity_pb2.Identity,
    "plan": owner_pb2.Plan,
    "apply": owner_pb2.TransitionRecord,
    "generate": inference_pb2.GenerateResponse,
}
"""What an owner can be asked, by the message that answers. ``apply`` is what a transition did."""

_NUMBERS: Final = {"double", "float", "uint32", "uint64", "int32", "int64"}


def shape_of(descriptor: Any) -> dict[str, Any]:
    """A message as JSON: field -> ``string``, ``number``, ``boolean``, a list of names, a list, a map or an object."""
    return {field.name: _field(field) for field in descriptor.fields}


def _field(field: Any) -> Any:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        return {"map of": _kind(message.fields_by_name["value"])}
    return [_kind(field)] if field.is_repeated else _kind(field)


def _kind(field: Any) -> Any:
    if field.message_type is not None:
        if field.message_type.full_name == "google.protobuf.Timestamp":
            return "seconds or null"
        return shape_of(field.message_type)
    if field.enum_type is not None:
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        return " | ".join([*(value.name.removeprefix(prefix) for value in field.enum_type.values[1:]), "null"])
    names = {
        value: name.removeprefix("TYPE_").lower()
        for name, value in vars(type(field)).items()
        if name.startswith("TYPE_")
    }
    kind = names[field.type]
    return "number" if kind in _NUMBERS else {"bool": "boolean"}.get(kind, kind)
