"""``rowlock convert``."""

from __future__ import annotations

from pathlib import Path

import click

from rowlock.bindings.checkpoint.errors import CheckpointError
from rowlock.bindings.checkpoint.gguf import Conversion, convert_gguf
from rowlock.cli.client import EXIT_REFUSED, ClientError
from rowlock.cli.options import Output, output_options
from rowlock.cli.progress import progress_bar
from rowlock.cli.render import print_json, size


@click.command()
@click.argument("source", type=click.Path(path_type=Path, dir_okay=False))
@click.argument("directory", type=click.Path(path_type=Path))
@output_options
def command(source: Path, directory: Path, output: Output) -> None:
    """Turn a GGUF file into a bf16 checkpoint directory.

    The directory appears when it is complete. Needs the 'convert' extra.
    """
    conversion = convert(source, directory, output)
    if output.json:
        print_json(
            {
                "directory": str(conversion.directory),
                "tensors": conversion.tensors,
                "bytes": conversion.nbytes,
            }
        )
    else:
        click.echo(f"{conversion.directory}: {conversion.tensors} tensors, {size(conversion.nbytes)}")


def convert(source: Path, directory: Path, output: Output) -> Conversion:
    """Convert with progress. Raises ClientError."""
    done = 0
    try:
        with progress_bar(output, 1000, "converting") as advance:

            def progress(count: int, total: int) -> None:
                nonlocal done
                now = 1000 * count // total
                advance(now - done)
                done = now

            return convert_gguf(source, directory, progress)
    except CheckpointError as error:
        raise ClientError(str(error), EXIT_REFUSED, error.hint, error.fault.value) from error
    except FileExistsError:
        raise ClientError(
            f"{directory}: exists already", EXIT_REFUSED, "remove it, or give another directory"
        ) from None
