"""``rowlock verify``."""

from __future__ import annotations

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import print_json, short, size, to_json
from rowlock.v1 import owner_pb2

EXIT_MISMATCH = 7


@click.command()
@click.option("--sample", type=click.IntRange(min=1), help="Read so many allocations, not all.")
@click.option(
    "--seed", type=click.IntRange(min=1, max=2**63), help="With --sample: chooses which. [default: the owner's]"
)
@client_options
def command(client: Client, output: Output, sample: int | None, seed: int | None) -> int:
    """Read the whole model back, or a sample of it, and compare it with its identity."""
    if seed and not sample:
        raise click.UsageError("--seed goes with --sample")
    answer = client.call(client.owner.Verify, owner_pb2.VerifyRequest(sample=sample or 0, seed=seed or 0))
    if output.json:
        print_json(to_json(answer))
    else:
        verdict = "proved" if answer.ok else "NOT what the device holds"
        click.echo(f"{short(answer.identity)}, generation {answer.generation}: {verdict}")
        click.echo(f"  read back {size(answer.bytes_read_back)} in {answer.total_ms:.0f} ms")
        if sample:
            click.echo(f"  of {', '.join(answer.parents)}; again with --sample {sample} --seed {answer.seed}")
        for drift in answer.drift:
            click.echo(
                f"  differs: {drift.tensor}, within rows {drift.first_row} to {drift.first_row + drift.rows - 1}"
            )
    return 0 if answer.ok else EXIT_MISMATCH
