"""``rowlock history``."""

from __future__ import annotations

from datetime import UTC

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import level_name, print_json, record_lines, short, state_name, to_json
from rowlock.v1 import owner_pb2


@click.command()
@click.argument("transition", required=False)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@client_options
def command(client: Client, output: Output, transition: str | None, limit: int) -> None:
    """Transitions, newest first; or one of them in full, by its id or request id."""
    if transition:
        _show_one(client, output, transition)
        return
    answer = client.call(client.owner.ListTransitions, owner_pb2.ListTransitionsRequest(limit=limit))
    if output.json:
        print_json([to_json(record) for record in answer.records])
        return
    for record in answer.records:
        when = record.created.ToDatetime(UTC).strftime("%Y-%m-%d %H:%M:%S")
        click.echo(
            f"{when}Z  {record.id}  {record.kind:<10} {level_name(record.level):<4} {state_name(record.state):<11} "
            f"generation {record.generation or '-'}  {short(record.to)}"
            + (f"  {record.reason}" if record.reason else "")
        )


def _show_one(client: Client, output: Output, transition: str) -> None:
    answer = client.call(client.owner.GetTransition, owner_pb2.GetTransitionRequest(id=transition))
    if output.json:
        print_json(to_json(answer))
        return
    click.echo("\n".join(record_lines(answer.record)))
    for event in answer.events:
        click.echo(f"  {event.sequence:>3} {state_name(event.state):<12} {event.message}")
