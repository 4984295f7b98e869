"""``rowlock transition``."""

from __future__ import annotations

from pathlib import Path

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.targets import REQUIRE, precondition_options, show_events, target_options, transition_options
from rowlock.v1 import owner_pb2


@click.command()
@target_options
@click.option("--plan-digest", default="", help="Refuse if the owner's plan is another one by now.")
@precondition_options
@transition_options
@client_options
def command(
    client: Client,
    output: Output,
    target: Path,
    require: str,
    plan_digest: str,
    request_id: str,
    etag: str,
    options: owner_pb2.TransitionOptions,
) -> int:
    """Move the owner to a checkpoint, as a transaction.

    Ctrl-C and --timeout detach; they do not cancel.
    """
    request = owner_pb2.TransitionRequest(
        target=str(target),
        require=REQUIRE[require],
        plan_digest=plan_digest,
        request_id=request_id,
        etag=etag,
        options=options,
    )
    answers = client.stream(client.owner.Transition, request)
    return show_events((answer.event for answer in answers), output)
