"""Every named point is reached, on both of its sides: by what simulated owners live through, and by imports.

Beside the points there is nothing: durable files are written through the seam that reports them, and no other way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kill_file import KillOrder, Place
from support.prefilling import Remote, remote_owner

from rowlock.daemon.prefill.protocol.frames import Mode
from rowlock.journal.points import Moment, Point
from sim.device import Device
from sim.disk import Disk
from sim.laws import Watch
from sim.process import SimPoints
from sim.scenarios import SCENARIOS, World, prepare, run

OF_IMPORTS = (Point.WRITE_STATES, Point.ADMIT_PROMPT)
"""Only an owner whose prompts a source computes comes by these; the simulated device takes none in."""
WRITERS = {"os", "shutil", "tempfile", "io"}
PATH_WRITES = {"write_bytes", "write_text", "mkdir", "unlink", "rmdir", "rename", "symlink_to", "hardlink_to"}
SRC = Path(__file__).resolve().parents[2] / "src" / "rowlock"


@pytest.fixture(scope="module")
def seen(world: World) -> dict[tuple[Point, Moment], set[str]]:
    """The phases in which each point was reached."""
    found: dict[tuple[Point, Moment], set[str]] = {}

    def begin(_disk: Disk, _device: Device, points: SimPoints) -> None:
        points.observers.append(
            lambda point, moment, _subject: found.setdefault((point, moment), set()).add(points.phase)
        )

    for scenario in SCENARIOS.values():
        disk, device = prepare(world, scenario.base)
        run(world, scenario, disk, device, Watch(world.truth), begin).close()
    return found


@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("point", [point for point in Point if point not in OF_IMPORTS])
def test_every_point_is_reached(seen: dict[tuple[Point, Moment], set[str]], point: Point, moment: Moment) -> None:
    assert (point, moment) in seen


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> KillOrder:
    return KillOrder(tmp_path_factory.mktemp("order") / "order.json")


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory, tiny: Path, order: KillOrder) -> Iterator[Remote]:
    """An owner whose prompts a real source process computes."""
    state = tmp_path_factory.mktemp("remote") / "state"
    with remote_owner(state, tiny, owner={"kill_file": order.file}, mode=Mode.STREAM) as owner:
        yield owner


@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("point", OF_IMPORTS)
def test_every_point_of_an_import_is_reached(remote: Remote, order: KillOrder, point: Point, moment: Moment) -> None:
    with order.pause_at(Place(point, moment)):
        answer = remote.ask("hello", 4)
        order.wait()
    assert len(answer.wait()) == 4


@pytest.mark.parametrize("area", ["daemon/owner", "journal"])
def test_durable_files_are_written_through_the_seam_alone(area: str) -> None:
    """Whoever wrote past it would have no points, and no simulated disk under it."""
    past = []
    for path in sorted((SRC / area).rglob("*.py")):
        if path != SRC / "journal" / "file_system.py":
            past += [f"{path.name}:{node.lineno}" for node in ast.walk(ast.parse(path.read_text())) if _writes(node)]
    assert past == []


def _writes(node: ast.AST) -> bool:
    """Whether this could change a file: by the builtin, by a library, or by a method of paths."""
    match node:
        case ast.Import(names=names):
            return bool({name.name for name in names} & WRITERS)
        case ast.ImportFrom(module=module):
            return module in WRITERS
        case ast.Call(func=ast.Name(id="open")):
            return True
        case ast.Call(func=ast.Attribute(attr=name, value=of)):
            return name in PATH_WRITES and not (isinstance(of, ast.Attribute) and of.attr == "system")
    return False


def test_the_effects_of_a_transition_lie_in_their_phases(seen: dict[tuple[Point, Moment], set[str]]) -> None:
    def phases(point: Point) -> set[str]:
        return seen[point, Moment.BEFORE]

    assert phases(Point.WRITE_ROWS) == {"", "apply", "load", "restore"}, "'' is the load of a starting owner"
    assert {"undo", "verify", "restore"} <= phases(Point.READ_ROWS)
    assert phases(Point.COMMIT_PUBLISH) == {"publish"}
    assert phases(Point.COMMIT_INTENT) == {"drain"}
    assert {"undo_file", "stage"} <= phases(Point.SYNC_FILE)
