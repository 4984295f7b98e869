"""``rowlock cancel``."""

from __future__ import annotations

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import print_json, record_lines, to_json
from rowlock.v1 import owner_pb2


@click.command()
@click.argument("transition")
@client_options
def command(client: Client, output: Output, transition: str) -> None:
    """End the open transition (its id, or request id) before its first device write."""
    record = client.call(client.owner.Cancel, owner_pb2.CancelRequest(transition=transition)).record
    if output.json:
        print_json(to_json(record))
    else:
        click.echo("\n".join(record_lines(record)))
