"""``rowlock status``."""

from __future__ import annotations

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import SHORT, print_json, short, source_lines, to_json
from rowlock.cli.watching import watch
from rowlock.v1 import owner_pb2


@click.command()
@click.option("--watch", "watching", is_flag=True, help="Go on showing it, until Ctrl-C.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.05),
    default=1.0,
    show_default=True,
    help="Seconds between two looks; a change of state is shown at once.",
)
@client_options
def command(client: Client, output: Output, watching: bool, interval: float) -> None:
    """What the owner is doing."""
    if watching:
        watch(client, output, interval, status_lines)
        return
    owner = client.call(client.owner.GetOwner, owner_pb2.GetOwnerRequest()).owner
    if output.json:
        print_json(to_json(owner))
    else:
        click.echo("\n".join(status_lines(owner)))


def status_lines(owner: owner_pb2.Owner) -> list[str]:
    """An owner for a person."""
    state = owner_pb2.OwnerState.Name(owner.state).removeprefix("OWNER_STATE_")
    lines = [f"{owner.device}: {state}" + (f" ({owner.reason})" if owner.reason else "")]
    if owner.HasField("identity"):
        lines.append(f"  identity   {short(owner.identity)}, generation {owner.generation}")
        lines.append(f"  checkpoint {owner.checkpoint}")
    lines += [
        f"  DRIFT      {drift.tensor}, within rows {drift.first_row} to {drift.first_row + drift.rows - 1}"
        for drift in owner.drift
    ]
    if owner.transition:
        lines.append(f"  transition {owner.transition} is open")
    lines.append(f"  requests   {owner.requests_active} active, {owner.requests_waiting} waiting")
    lines += [
        f"    lease    {lease.request[:SHORT]}  generation {lease.generation}  "
        f"held {lease.held_s:.1f} s  {lease.tokens} tokens"
        for lease in owner.leases
    ]
    lines += source_lines(owner.source) if owner.HasField("source") else []
    lines.append(f"  etag       {owner.etag}")
    return lines
