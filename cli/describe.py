"""``rowlock describe``."""

from __future__ import annotations

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import print_json, size, source_lines, to_json
from rowlock.v1 import owner_pb2


@click.command()
@client_options
def command(client: Client, output: Output) -> None:
    """Device, allocations and counters of the owner."""
    answer = client.call(client.owner.Describe, owner_pb2.DescribeRequest())
    if output.json:
        print_json(to_json(answer))
        return
    versions = ", ".join(f"{name} {version}" for name, version in sorted(answer.versions.items()))
    logical = f" (here {answer.logical_device})" if answer.logical_device != answer.owner.device else ""
    click.echo(
        f"rowlock {answer.version}, device {answer.owner.device}{logical}, binding {answer.binding} ({versions})"
    )
    click.echo(f"  execution  {answer.execution}; a readback proves: {answer.readback}")
    for option in answer.test_options:
        click.echo(f"  TEST OPTION {option}")
    if answer.parents:
        click.echo(
            f"  model      {answer.architecture}, {size(answer.resident_bytes)} in {len(answer.parents)} allocations, "
            f"context {answer.context_tokens}"
        )
    for group in answer.cache.groups:
        seen = f"the last {group.window} positions" if group.window else "all positions"
        click.echo(
            f"  cache      {group.layers} layers over {seen}: {group.in_use} of {group.pages} pages of "
            f"{answer.cache.page_tokens} tokens in use, {group.cached} kept for prompts to come"
        )
    served = answer.served
    click.echo(
        f"  served     {served.tokens} tokens in {served.steps} steps, {served.prompt_tokens} of prompts "
        f"({answer.cache.hit_tokens} found), {served.preemptions} preemptions"
    )
    for line in source_lines(answer.owner.source) if answer.owner.HasField("source") else []:
        click.echo(line)
    counters = to_json(answer.counters)
    click.echo("  counters   " + ", ".join(f"{name} {value}" for name, value in counters.items()))
