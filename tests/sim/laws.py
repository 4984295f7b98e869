"""The ten invariants of an owner, each said once, from facts that anybody could look up.

They hold at every point of a run (`watch`), in every image that a crash leaves (`check_image`), and after every
recovery (`check_recovered`). docs/invariants.md names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from blake3 import blake3
from support.owners import Answer

from rowlock.journal.points import Moment, Point
from sim.device import Device, reference
from sim.disk import Crash, Disk
from sim.facts import ENDED, Facts, undo_groups
from sim.process import PROMPT, Observer, Process


@dataclass
class Truth:
    """What the weights of each identity are, byte by byte.

    Attributes:
        parents: by weights root: the bytes of each parent.
        groups: where a group of a tensor lies: (tensor, group) -> (parent, offset).

    """

    parents: dict[str, dict[str, bytes]] = field(default_factory=dict)
    places: dict[tuple[str, int], tuple[str, int]] = field(default_factory=dict)

    def digest(self, weights: str) -> str:
        digest = blake3()
        for name in sorted(self.parents[weights]):
            digest.update(self.parents[weights][name])
        return digest.hexdigest()

    def is_on(self, device: Device, weights: str) -> bool:
        want = self.parents[weights]
        return (
            device.live.keys() == want.keys()
            and not device.started
            and all(device.slots[name].tobytes() == want[name] for name in want)
        )


def law_1_ready_is_proved(process: Process, truth: Truth) -> None:
    """READY is visible only when the device's bytes equal the published identity."""
    view = process.owner.view
    if view.state == "READY":
        assert view.resident is not None
        assert truth.is_on(process.device, view.resident.model.identity.weights), "law 1: READY on other bytes"


def law_2_one_open(facts: Facts) -> None:
    """At most one transition is open."""
    assert sum(item.open for item in facts.transitions.values()) <= 1, "law 2: two open transitions"


def law_3_undo_before_write(process: Process, truth: Truth) -> None:
    """No device write before the intent, and the undo, are durable: they survive the loss of all that is not."""
    durable = process.disk.after(Crash.DROPPED, 0)
    facts = Facts.of(durable)
    opened = [(name, item) for name, item in facts.transitions.items() if item.open]
    assert len(opened) == 1, "law 3: a device write without a durable intent"
    name, item = opened[0]
    assert item.state == "JOURNALED", f"law 3: a device write in {item.state}"
    record = process.record(name)
    if record.undo == "DURABLE":
        groups = undo_groups(durable, name)
        assert groups is not None, "law 3: a device write without a durable undo"
        assert record.from_identity is not None
        assert record.to_identity is not None
        drifted = process.device.resident() if record.kind == "repair" else {}  # of no published identity
        before = drifted or truth.parents[record.from_identity.weights]
        assert _undone(truth, groups, record.to_identity.weights) == before, "law 3: the undo does not lead back"


def _undone(truth: Truth, groups: Mapping[tuple[str, int], bytes], new: str) -> dict[str, bytearray]:
    """What an undo makes of an identity."""
    back = {name: bytearray(data) for name, data in truth.parents[new].items()}
    for key, data in groups.items():
        parent, offset = truth.places[key]
        back[parent][offset : offset + len(data)] = data
    return back


def law_4_publish_is_one_step(facts: Facts) -> None:
    """A published transition, its generation and the owner's identity are there together, or none is."""
    published = {name for name, item in facts.transitions.items() if item.state == "PUBLISHED"}
    assert published == {item.transition for item in facts.generations.values()}, "law 4: half a publish"
    assert published == {name for name, states in facts.events.items() if states[-1] == "PUBLISHED"}, (
        "law 4: half a publish"
    )
    assert facts.current == max(facts.generations, default=None), "law 4: half a publish"


def law_5_recovery_ends(facts: Facts) -> None:
    """Recovery leaves nothing open."""
    for name, item in facts.transitions.items():
        assert not item.open, f"law 5: {name} is still open"
        assert item.state in ENDED, f"law 5: {name} is {item.state}"


def law_5_twice_is_once(first: Facts, second: Facts) -> None:
    """A second recovery changes nothing."""
    assert first == second, "law 5: recovering twice is not recovering once"


def law_6_quarantine_stays(process: Process, promised: Facts, facts: Facts) -> None:
    """Quarantine ends only by an explicit release: nothing is resident until then."""
    if promised.quarantined:
        assert facts.quarantined, "law 6: the quarantine is forgotten"
    if facts.quarantined:
        view = process.owner.view
        assert view.quarantined, "law 6: quarantined, and not visible"
        assert view.state == "QUARANTINED", "law 6: quarantined, and not visible"
        assert not process.device.live, "law 6: quarantined, and something is loaded"


def law_7_generations_grow(promised: Facts, facts: Facts) -> None:
    """Generations never fall, and no number is given out twice."""
    assert facts.next_generation >= promised.next_generation, "law 7: a generation can be given out twice"
    assert (facts.current or 0) >= (promised.current or 0), "law 7: the generation fell"
    taken = [item.generation for item in facts.transitions.values() if item.generation is not None]
    assert len(taken) == len(set(taken)), "law 7: a generation was given out twice"
    assert all(number < facts.next_generation for number in taken), "law 7: a generation can be given out twice"


def law_8_one_request_one_transition(promised: Facts, facts: Facts) -> None:
    """A request id, once taken, names one transition for ever, and what was asked for: others are refused by that."""
    before = {item.request_id: (name, item.request_digest) for name, item in promised.transitions.items()}
    now = {item.request_id: (name, item.request_digest) for name, item in facts.transitions.items() if item.request_id}
    before.pop(None, None)
    assert len(now) == sum(1 for item in facts.transitions.values() if item.request_id), "law 8: an id names two"
    assert before.items() <= now.items(), "law 8: a request id was forgotten"


def law_9_reads_never_wait(process: Process) -> None:
    """View and history answer at any moment: with one thread, whoever waited would wait for ever."""
    assert process.owner.view is not None
    process.journal.transitions(1)


def law_10_one_identity(answer: Answer, truth: Truth) -> None:
    """An answer is its lease's identity's, token by token."""
    assert answer.lease is not None
    want = reference(truth.digest(answer.identity.weights), PROMPT, len(answer.tokens))
    assert answer.tokens == want, "law 10: an answer of mixed identities"


def promises_are_kept(promised: Facts, facts: Facts) -> None:
    """What was committed is still there, and what had ended has not moved."""
    for name, item in promised.transitions.items():
        assert name in facts.transitions, f"{name} was promised, and is gone"
        if item.state in ENDED:
            assert facts.transitions[name] == item, f"{name} had ended as {item.state}"
    assert promised.generations.items() <= facts.generations.items(), "a published generation is gone"


def check_image(disk: Disk, promised: Facts) -> Facts:
    """What must hold of a disk, whatever happened to its process."""
    facts = Facts.of(disk)
    _check_facts(facts, promised)
    return facts


def _check_facts(facts: Facts, promised: Facts) -> None:
    law_2_one_open(facts)
    law_4_publish_is_one_step(facts)
    law_7_generations_grow(promised, facts)
    law_8_one_request_one_transition(promised, facts)
    promises_are_kept(promised, facts)
    if promised.quarantined:
        assert facts.quarantined, "law 6: the quarantine is forgotten"


def check_recovered(process: Process, truth: Truth, promised: Facts) -> Facts:
    """What must hold after a recovery: old, new or quarantined, and proved."""
    facts = Facts.read(process.journal._file._reader.conn)
    _check_facts(facts, promised)
    law_1_ready_is_proved(process, truth)
    law_5_recovery_ends(facts)
    law_6_quarantine_stays(process, promised, facts)
    law_9_reads_never_wait(process)
    assert not process.device.hazards, process.device.hazards
    view = process.owner.view
    if facts.quarantined:
        return facts
    if facts.identity is None:
        assert view.state == "EMPTY", f"nothing was published, and the owner is {view.state}"
        return facts
    assert view.state == "READY", f"neither old nor new: {view.state}, {view.reason}"
    assert view.resident is not None
    resident = view.resident.model.identity
    assert (resident.program, resident.assets, resident.weights) == facts.identity, "neither old nor new"
    assert view.resident.generation == facts.current
    return facts


class Watch:
    """Looks at a process at each of its points, and keeps what its commits promised."""

    def __init__(self, truth: Truth) -> None:
        self.truth = truth
        self.process: Process | None = None
        self.promised = Facts()
        self.proves_ready = True
        self._proved = ""

    @property
    def observer(self) -> Observer:
        return self._at

    def _at(self, point: Point, moment: Moment, _subject: str) -> None:
        process = self.process
        if process is None:
            return
        if self.proves_ready and not point.endswith(("_file", "_directory")):
            law_1_ready_is_proved(process, self.truth)
        if moment is Moment.BEFORE and (point is Point.FENCE or point.startswith("commit")):
            law_9_reads_never_wait(process)
        if point is Point.WRITE_ROWS and moment is Moment.BEFORE and process.points.phase == "apply":
            opened = process.owner.view.transition
            if opened != self._proved:
                law_3_undo_before_write(process, self.truth)
                self._proved = opened
        if moment is Moment.AFTER and point.startswith(("commit", "settle")):
            self.promised = Facts.read(process.journal._file._reader.conn)
