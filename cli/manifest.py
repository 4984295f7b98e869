"""``rowlock manifest``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from rowlock.bindings.checkpoint.cache import LOCAL_NAME
from rowlock.bindings.checkpoint.config import program_digest, tied_aliases
from rowlock.bindings.checkpoint.directory import Checkpoint
from rowlock.bindings.checkpoint.errors import CheckpointError
from rowlock.bindings.checkpoint.hashing import Hasher
from rowlock.bindings.checkpoint.identity import Identity
from rowlock.bindings.checkpoint.manifest import Manifest
from rowlock.cli.client import EXIT_REFUSED, ClientError
from rowlock.cli.options import Output, output_options
from rowlock.cli.progress import progress_bar
from rowlock.cli.render import print_json, size


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--write/--no-write", default=True, show_default=True, help=f"Keep it as {LOCAL_NAME} in the directory.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@output_options
def command(directory: Path, write: bool, threads: int, output: Output) -> None:
    """Digest a checkpoint directory: its identity, without a daemon."""
    try:
        with Checkpoint.open(directory) as checkpoint:
            manifest = _build(checkpoint, threads, output)
            identity = Identity(program_digest(checkpoint.config), checkpoint.assets.digest, manifest.root)
            if write:
                _write(checkpoint.directory / LOCAL_NAME, manifest.serialise(checkpoint.stamps))
    except CheckpointError as error:
        raise ClientError(str(error), EXIT_REFUSED, error.hint, error.fault.value) from error
    if output.json:
        print_json(
            {
                "directory": str(directory.resolve()),
                "identity": {**vars(identity), "digest": identity.digest},
                "tensors": len(manifest.tensors),
                "groups": manifest.groups,
                "bytes": manifest.nbytes,
            }
        )
        return
    click.echo(f"{identity.digest}")
    click.echo(f"  program {identity.program}\n  assets  {identity.assets}\n  weights {identity.weights}")
    click.echo(f"  {len(manifest.tensors)} tensors, {manifest.groups} groups, {size(manifest.nbytes)}")


def _build(checkpoint: Checkpoint, threads: int, output: Output) -> Manifest:
    total = sum(info.nbytes for info in checkpoint.tensors.values())
    with ThreadPoolExecutor(threads) as executor, progress_bar(output, total, "hashing") as advance:
        return Hasher(executor).manifest(checkpoint, tied_aliases(checkpoint.config), advance)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.rename(path)
