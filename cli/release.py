"""``rowlock release``."""

from __future__ import annotations

import getpass

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import print_json
from rowlock.v1 import owner_pb2


@click.command()
@click.option("--who", default=getpass.getuser, show_default="the user", help="Who takes the responsibility.")
@click.option("--why", required=True, help="What was found out about the device.")
@client_options
def command(client: Client, output: Output, who: str, why: str) -> None:
    """Release a quarantined device. The daemon ends; only a later one may load a model."""
    client.call(client.owner.ReleaseQuarantine, owner_pb2.ReleaseQuarantineRequest(who=who, why=why))
    if output.json:
        print_json({"released": True, "who": who, "why": why})
    else:
        click.echo("released; the daemon has ended: start it again")
