"""Pushed rows: a target that exists nowhere but in the rows that came over the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from rowlock.bindings.checkpoint.hashing import hash_groups
from rowlock.bindings.checkpoint.manifest import DIGEST_BYTES, Manifest, TensorManifest
from rowlock.bindings.checkpoint.tensors import Bytes, TensorInfo
from rowlock.bindings.plan import Model
from rowlock.daemon.owner.core import Core, Steps
from rowlock.daemon.owner.resident import Resident
from rowlock.daemon.owner.rows import group_ranges
from rowlock.daemon.owner.sources import GroupSource
from rowlock.daemon.owner.target import Target
from rowlock.v1.errors import OwnerError, Reason


@dataclass
class PushedRows:
    """Rows as they come in, checked against the resident layout at once.

    Attributes:
        tensors: of the resident model.
        bytes_max: rows beyond that are refused.

    """

    tensors: Mapping[str, TensorInfo]
    bytes_max: int
    rows: dict[str, dict[int, memoryview]] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, tensor: str, first_row: int, data: bytes) -> None:
        """Take consecutive whole rows.

        Raises:
            OwnerError: ARGUMENT_INVALID, naming the field, or MEMORY_SHORT.

        """
        info = self.tensors.get(tensor)
        if info is None:
            raise OwnerError(Reason.ARGUMENT_INVALID, f"tensor: {tensor[:200]!r} is not resident")
        count, rest = divmod(len(data), info.row_bytes)
        if rest or not count:
            raise OwnerError(
                Reason.ARGUMENT_INVALID,
                f"data: {len(data)} bytes are not whole rows of {info.row_bytes} bytes ({tensor})",
            )
        if first_row + count > info.rows:
            raise OwnerError(
                Reason.ARGUMENT_INVALID,
                f"first_row: rows {first_row} to {first_row + count - 1} of {tensor}, which has {info.rows}",
            )
        self.nbytes += len(data)
        if self.nbytes > self.bytes_max:
            raise OwnerError(Reason.MEMORY_SHORT, f"a push holds at most {self.bytes_max} bytes")
        known, view = self.rows.setdefault(tensor, {}), memoryview(data)
        for index in range(count):
            if first_row + index in known:
                raise OwnerError(Reason.ARGUMENT_INVALID, f"first_row: row {first_row + index} of {tensor} came twice")
            known[first_row + index] = view[index * info.row_bytes : (index + 1) * info.row_bytes]

    def groups(self) -> dict[str, list[int]]:
        """The groups that the rows lie in, by tensor."""
        return {
            name: sorted({row // self.tensors[name].group_rows for row in rows}) for name, rows in self.rows.items()
        }


def target_of_push(core: Core, rows: PushedRows, overlay: str) -> Steps[Target]:
    """The target that the resident model becomes with some rows replaced.

    The groups that the rows lie in are read from the device and proved, then the rows are
    laid over them and digested.

    Args:
        core: the owner's.
        rows: whole rows.
        overlay: a new name, under which the pushed groups are kept.

    Raises:
        OwnerError: EMPTY, DRIFT, or GENERATION_STALE when a transition came between.

    """
    resident = core.resident
    if resident is None:
        raise OwnerError(Reason.EMPTY, core.reason or "nothing is resident")
    if not rows.rows:
        raise OwnerError(Reason.ARGUMENT_INVALID, "rows: none were pushed")
    groups: dict[tuple[str, int], Bytes] = {}
    budget = core.step_budget()
    allocations, layout = resident.runtime.allocations, resident.model.layout
    for name, indices in rows.groups().items():
        for index in indices:
            if core.resident is not resident or core.writing:
                raise OwnerError(Reason.GENERATION_STALE, "a transition came while the push was being prepared")
            item = group_ranges({name: [index]}, layout, allocations)[0]
            data = np.empty(item.bytes, np.uint8)
            core.binding.memory.read_rows(allocations[item.parent], item.first_row, data)
            groups[name, index] = data
            if budget.spend(item.bytes):
                yield None
    return (yield from core.on_worker(_lay_over, resident, rows, groups, overlay, core))


def _lay_over(
    resident: Resident, rows: PushedRows, groups: dict[tuple[str, int], Bytes], overlay: str, core: Core
) -> Target:
    model = resident.model
    changed: dict[str, TensorManifest] = {}
    for (name, index), data in groups.items():
        tensor = changed.get(name, model.manifest.tensors[name])
        info = tensor.info
        first, stop = info.group_span(index)
        if hash_groups(data, data.nbytes) != model.manifest.tensors[name].group(index):
            raise OwnerError(Reason.DRIFT, f"{name}: resident rows {first} to {stop - 1} are not those of the identity")
        for row in range(first, stop):
            if row in rows.rows[name]:
                start = (row - first) * info.row_bytes
                data[start : start + info.row_bytes] = np.frombuffer(rows.rows[name][row], np.uint8)
        digests = bytearray(tensor.digests)
        digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES] = hash_groups(data, data.nbytes)
        changed[name] = TensorManifest(info, bytes(digests))
    manifest = Manifest.of({**model.manifest.tensors, **changed}.values())
    pushed = {key: data.data for key, data in groups.items()}
    before = core.stores.pushed.read(resident.overlay) if resident.overlay else {}
    identity = replace(model.identity, weights=manifest.root)
    return Target(
        model=Model(identity, manifest, model.layout, model.checkpoint),
        config=resident.config,
        text=resident.text,
        source=GroupSource({name: tensor.info for name, tensor in manifest.tensors.items()}, pushed),
        stamps=resident.stamps,
        whole=False,
        overlay=overlay,
        pushed={**before, **pushed},
    )
