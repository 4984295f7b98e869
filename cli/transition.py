"""``rowlock transition``."""

from __future__ import annotations

from pathlib import Path

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.targets import REQUIRE, show_events, target_options
from rowlock.v1 import owner_pb2


@click.command()
@target_options
@click.option("--plan-digest", default="", help="Refuse if the owner's plan is another one by now.")
@click.option("--request-id", default="", help="The same id is the same transition.")
@click.option("--allow-irreversible", is_flag=True, help="Go on although the old identity could not be rebuilt.")
@client_options
def command(
    client: Client,
    output: Output,
    target: Path,
    require: str,
    plan_digest: str,
    request_id: str,
    allow_irreversible: bool,
) -> int:
    """Move the owner to a checkpoint, as a transaction.

    Ctrl-C and --timeout detach; they do not cancel.
    """
    request = owner_pb2.TransitionRequest(
        target=str(target),
        require=REQUIRE[require],
        plan_digest=plan_digest,
        request_id=request_id,
        allow_irreversible=allow_irreversible,
    )
    answers = client.stream(client.owner.Transition, request)
    return show_events((answer.event for answer in answers), output)
