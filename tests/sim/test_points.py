"""Every named point is reached, on both of its sides, by what simulated owners live through."""

from __future__ import annotations

import pytest

from rowlock.journal.points import Moment, Point
from sim.device import Device
from sim.disk import Disk
from sim.laws import Watch
from sim.process import SimPoints
from sim.scenarios import SCENARIOS, World, prepare, run


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
@pytest.mark.parametrize("point", Point)
def test_every_point_is_reached(seen: dict[tuple[Point, Moment], set[str]], point: Point, moment: Moment) -> None:
    assert (point, moment) in seen


def test_the_effects_of_a_transition_lie_in_their_phases(seen: dict[tuple[Point, Moment], set[str]]) -> None:
    def phases(point: Point) -> set[str]:
        return seen[point, Moment.BEFORE]

    assert phases(Point.WRITE_ROWS) == {"", "apply", "load", "restore"}, "'' is the load of a starting owner"
    assert {"undo", "verify", "restore"} <= phases(Point.READ_ROWS)
    assert phases(Point.COMMIT_PUBLISH) == {"publish"}
    assert phases(Point.COMMIT_INTENT) == {"drain"}
    assert {"undo_file", "stage"} <= phases(Point.SYNC_FILE)
