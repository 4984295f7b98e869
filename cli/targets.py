"""Options and output that plan, transition and rollback share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from rowlock.cli.client import OUTCOME_EXIT
from rowlock.cli.options import Output
from rowlock.cli.render import print_json, record_lines, state_name, to_json
from rowlock.v1 import owner_pb2

F = TypeVar("F", bound=Callable[..., Any])

REQUIRE: Final = {
    "auto": owner_pb2.REQUIRE_AUTO,
    "b2": owner_pb2.REQUIRE_B2,
    "b1": owner_pb2.REQUIRE_B1,
}


def target_options(command: F) -> F:
    """``--target`` and ``--require``."""
    target = click.option(
        "--target",
        required=True,
        type=click.Path(path_type=Path, resolve_path=True),
        help="Checkpoint directory, as the daemon sees it.",
    )
    require = click.option(
        "--require",
        type=click.Choice(sorted(REQUIRE)),
        default="auto",
        show_default=True,
        help="This level or nothing.",
    )
    return target(require(command))


def show_events(events: Iterator[owner_pb2.TransitionEvent], output: Output) -> int:
    """Show a transition as it goes; the exit code of its outcome."""
    code = 0
    for event in events:
        if output.json:
            print_json(to_json(event))
        else:
            output.progress(f"{state_name(event.state):<12} {event.message}")
        if event.HasField("record"):
            code = OUTCOME_EXIT[event.state]
            if not output.json:
                click.echo("\n".join(record_lines(event.record)))
    return code
