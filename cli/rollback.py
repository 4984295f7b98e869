"""``rowlock rollback``."""

from __future__ import annotations

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.targets import show_events
from rowlock.v1 import owner_pb2


@click.command()
@click.option("--generation", type=click.IntRange(min=1), help="Refuse unless this generation is the current one.")
@click.option("--request-id", default="", help="The same id is the same rollback.")
@client_options
def command(client: Client, output: Output, generation: int | None, request_id: str) -> int:
    """Go back to the identity before the current generation.

    That is a transition of its own: a second rollback undoes the first.
    """
    request = owner_pb2.RollbackRequest(generation=generation or 0, request_id=request_id)
    answers = client.stream(client.owner.Rollback, request)
    return show_events((answer.event for answer in answers), output)
