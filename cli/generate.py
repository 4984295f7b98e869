"""``rowlock generate``."""

from __future__ import annotations

import time

import click

from rowlock.cli.client import EXIT_INTERRUPTED, Client
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
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given four times.")
@click.option("--identity", default="", help="Digest that has to answer, or its first 12 characters.")
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
    stop: tuple[str, ...],
    identity: str,
    ignore_eos: bool,
) -> None:
    """Generate text with the resident model, shown as it comes.

    Ctrl-C gives the request up.
    """
    request = inference_pb2.GenerateRequest(
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop,
        identity=identity,
        ignore_eos=ignore_eos,
    )
    shown = _Shown(output)
    try:
        for message in client.stream(client.inference.Generate, request):
            shown.add(message)
    except KeyboardInterrupt:
        shown.end("given up")
        raise click.exceptions.Exit(EXIT_INTERRUPTED) from None
    shown.end()


class _Shown:
    """An answer on its way to the terminal."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._message = inference_pb2.GenerateResponse()
        self._tokens = 0
        self._first_s = 0.0

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        if message.tokens and not self._tokens:
            self._first_s = time.monotonic()
        self._tokens += len(message.tokens)
        self._message = message
        if self._output.json:
            print_json(to_json(message))
        else:
            click.echo(message.text, nl=False)

    def end(self, ended: str = "") -> None:
        """Say who answered, on stderr."""
        if self._output.json:
            return
        click.echo()
        ended = ended or inference_pb2.FinishReason.Name(self._message.finish_reason).removeprefix("FINISH_REASON_")
        who = f"{short(self._message.identity)}, generation {self._message.generation}"
        self._output.progress(f"[{who}; {self._tokens} tokens{self._rate()}; {ended.lower()}]")

    def _rate(self) -> str:
        spent_s = time.monotonic() - self._first_s
        return f", {(self._tokens - 1) / spent_s:.1f} a second" if self._tokens > 1 and spent_s > 0 else ""
