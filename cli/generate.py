"""``rowlock generate``."""

from __future__ import annotations

import click

from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import print_json, short, to_json
from rowlock.v1 import inference_pb2


@click.command()
@click.argument("prompt")
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True)
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0 is off.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token.")
@client_options
def command(
    client: Client,
    output: Output,
    prompt: str,
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int,
    ignore_eos: bool,
) -> None:
    """Generate text with the resident model."""
    request = inference_pb2.GenerateRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        ignore_eos=ignore_eos,
    )
    message = inference_pb2.GenerateResponse()
    for message in client.stream(client.inference.Generate, request):
        if output.json:
            print_json(to_json(message))
        else:
            click.echo(message.text, nl=False)
    if not output.json:
        click.echo()
        output.progress(f"[{short(message.identity)}, generation {message.generation}]")
