"""``rowlock status``."""

from __future__ import annotations

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import SHORT, print_json, short, to_json
from rowlock.v1 import owner_pb2


@click.command()
@client_options
def command(client: Client, output: Output) -> None:
    """What the owner is doing."""
    owner = client.call(client.owner.GetOwner, owner_pb2.GetOwnerRequest()).owner
    if output.json:
        print_json(to_json(owner))
        return
    state = owner_pb2.OwnerState.Name(owner.state).removeprefix("OWNER_STATE_")
    click.echo(f"{owner.device}: {state}" + (f" ({owner.reason})" if owner.reason else ""))
    if owner.HasField("identity"):
        click.echo(f"  identity   {short(owner.identity)}, generation {owner.generation}")
        click.echo(f"  checkpoint {owner.checkpoint}")
    for drift in owner.drift:
        click.echo(f"  DRIFT      {drift.tensor}, within rows {drift.first_row} to {drift.first_row + drift.rows - 1}")
    if owner.transition:
        click.echo(f"  transition {owner.transition} is open")
    click.echo(f"  requests   {owner.requests_active} active, {owner.requests_waiting} waiting")
    for lease in owner.leases:
        click.echo(
            f"    lease    {lease.request[:SHORT]}  generation {lease.generation}  "
            f"held {lease.held_s:.1f} s  {lease.tokens} tokens"
        )
    click.echo(f"  etag       {owner.etag}")
