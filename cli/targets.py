"""Options and output that plan, transition, rollback and unload share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from rowlock.cli.client import EXIT_UNREACHABLE, OUTCOME_EXIT, ClientError
from rowlock.cli.options import Output
from rowlock.cli.render import print_json, record_lines, state_name, to_json
from rowlock.v1 import owner_pb2

F = TypeVar("F", bound=Callable[..., Any])

REQUIRE: Final = {
    "auto": owner_pb2.REQUIRE_AUTO,
    "b2": owner_pb2.REQUIRE_B2,
    "b1": owner_pb2.REQUIRE_B1,
}
VERIFY: Final = {
    "parents": owner_pb2.VERIFY_MODE_PARENTS,
    "groups": owner_pb2.VERIFY_MODE_GROUPS,
    "all": owner_pb2.VERIFY_MODE_ALL,
}
TARGET_CHECK: Final = {
    "whole": owner_pb2.TARGET_CHECK_WHOLE,
    "staged": owner_pb2.TARGET_CHECK_STAGED,
}
DRAIN: Final = {
    "wait": owner_pb2.DRAIN_MODE_WAIT,
    "deadline": owner_pb2.DRAIN_MODE_DEADLINE,
    "cancel": owner_pb2.DRAIN_MODE_CANCEL,
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


def transition_options(command: F) -> F:
    """How a transition is carried out; the command gets a message as ``options``."""

    @click.option("--verify", type=click.Choice(list(VERIFY)), help="Read back before the publish. [daemon: parents]")
    @click.option("--target-check", type=click.Choice(list(TARGET_CHECK)), help="Digest of the target. [daemon: whole]")
    @click.option("--drain", type=click.Choice(list(DRAIN)), help="How running requests give way. [daemon: wait]")
    @click.option("--drain-deadline", type=click.FloatRange(min=0), default=0.0, help="Seconds, with --drain deadline.")
    @click.option("--allow-irreversible", is_flag=True, help="Go on although the old identity could not be rebuilt.")
    @click.option("--allow-nonfinite", is_flag=True, help="Accept new NaN or infinite values.")
    @functools.wraps(command)
    def wrapper(
        *args: Any,
        verify: str | None,
        target_check: str | None,
        drain: str | None,
        drain_deadline: float,
        allow_irreversible: bool,
        allow_nonfinite: bool,
        **kwargs: Any,
    ) -> Any:
        options = owner_pb2.TransitionOptions(
            verify=VERIFY[verify] if verify else owner_pb2.VERIFY_MODE_UNSPECIFIED,
            target_check=TARGET_CHECK[target_check] if target_check else owner_pb2.TARGET_CHECK_UNSPECIFIED,
            drain=DRAIN[drain] if drain else owner_pb2.DRAIN_MODE_UNSPECIFIED,
            drain_deadline_s=drain_deadline,
            allow_irreversible=allow_irreversible,
            allow_nonfinite=allow_nonfinite,
        )
        return command(*args, options=options, **kwargs)

    return wrapper  # type: ignore[return-value]


def precondition_options(command: F) -> F:
    """``--request-id`` and ``--etag``."""
    request_id = click.option("--request-id", default="", help="The same id is the same transition.")
    etag = click.option("--etag", default="", help="Refuse unless `rowlock status --json` still says this etag.")
    return request_id(etag(command))


def show_events(events: Iterator[owner_pb2.TransitionEvent], output: Output) -> int:
    """Show a transition as it goes; the exit code of its outcome."""
    for event in events:
        if output.json:
            print_json(to_json(event))
        else:
            output.progress(f"{state_name(event.state):<12} {event.message}")
        if event.HasField("record"):
            if not output.json:
                click.echo("\n".join(record_lines(event.record)))
            return OUTCOME_EXIT[event.state]
    raise ClientError("the daemon ended before the transition did", EXIT_UNREACHABLE, "`rowlock history` when it is up")
