"""``rowlock prepare``."""

from __future__ import annotations

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import print_json, to_json
from rowlock.v1 import owner_pb2


@click.command()
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Requests that run together.")
@click.option("--length", type=click.IntRange(min=1), required=True, help="Tokens of each prompt.")
@client_options
def command(client: Client, output: Output, batch: int, length: int) -> None:
    """Have a running owner be ready for requests of a shape; its weights are not touched."""
    request = owner_pb2.PrepareVariantRequest(batch=batch, length=length)
    answer = client.call(client.owner.PrepareVariant, request)
    if output.json:
        print_json(to_json(answer))
        return
    cost = to_json(answer.counters)
    click.echo(
        f"batch {batch}, length {length}: ready; {cost['compiles']} compiles, {cost['program_loads']} program loads, "
        f"{cost['workspaces']} workspaces"
    )
