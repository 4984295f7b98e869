"""``rowlock plan``."""

from __future__ import annotations

from pathlib import Path

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import plan_lines, print_json, to_json
from rowlock.cli.targets import REQUIRE, target_options, transition_options
from rowlock.v1 import owner_pb2


@click.command()
@target_options
@transition_options
@client_options
def command(client: Client, output: Output, target: Path, require: str, options: owner_pb2.TransitionOptions) -> None:
    """What a transition to a checkpoint would do. Changes nothing."""
    request = owner_pb2.PlanRequest(target=str(target), require=REQUIRE[require], options=options)
    plan = client.call(client.owner.Plan, request).plan
    if output.json:
        print_json(to_json(plan))
    else:
        click.echo("\n".join(plan_lines(plan)))
