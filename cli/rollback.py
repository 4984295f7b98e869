"""``rowlock rollback``."""

from __future__ import annotations

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.targets import precondition_options, show_events, transition_options
from rowlock.v1 import owner_pb2


@click.command()
@click.option("--to", type=click.IntRange(min=1), help="The generation to go back to; else the one before.")
@click.option("--generation", type=click.IntRange(min=1), help="Refuse unless this generation is the current one.")
@precondition_options
@transition_options
@client_options
def command(
    client: Client,
    output: Output,
    to: int | None,
    generation: int | None,
    request_id: str,
    etag: str,
    options: owner_pb2.TransitionOptions,
) -> int:
    """Go back to the identity of an earlier generation.

    That is a transition of its own: a second rollback undoes the first.
    """
    request = owner_pb2.RollbackRequest(
        to=to or 0, generation=generation or 0, request_id=request_id, etag=etag, options=options
    )
    answers = client.stream(client.owner.Rollback, request)
    return show_events((answer.event for answer in answers), output)
