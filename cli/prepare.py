"""``rowlock prepare``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rowlock.cli.client import EXIT_REFUSED, Client, ClientError
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import print_json, to_json
from rowlock.v1 import owner_pb2
from rowlock.v1.errors import REASONS, OwnerError

if TYPE_CHECKING:
    from rowlock.bindings.device import BuiltPrograms

EXIT_USAGE = 2


@click.command()
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Requests that run together.")
@click.option("--length", type=click.IntRange(min=1), help="Tokens of each prompt.")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, resolve_path=True),
    help="Ask no owner: build the programs that one will load with this checkpoint. Needs the device's environment, "
    "and no device.",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="With --checkpoint: the owner's TOML configuration, whose serving.variants are built; without any, and "
    "without --length, those that any request can be computed with.",
)
@click.option("--device", help="With --checkpoint: the owner's device.")
@click.option(
    "--without-hardware",
    is_flag=True,
    default=None,
    help="With --checkpoint: for an owner that is started with this option.",
)
@client_options
def command(
    client: Client,
    output: Output,
    batch: int,
    length: int | None,
    checkpoint: Path | None,
    config: Path | None,
    device: str | None,
    without_hardware: bool | None,
) -> None:
    """Be ready for requests of a shape: a running owner, or the directory in which programs are kept."""
    if checkpoint is not None:
        overrides = {"device": device, "without_hardware": without_hardware}
        _show(_make_ahead(checkpoint, config, overrides, (batch, length) if length else None), output)
        return
    if config is not None or device is not None or without_hardware is not None:
        raise ClientError("--config, --device and --without-hardware go with --checkpoint", EXIT_USAGE)
    if length is None:
        raise ClientError("--length is missing: of which shape?", EXIT_USAGE)
    request = owner_pb2.PrepareVariantRequest(batch=batch, length=length)
    answer = client.call(client.owner.PrepareVariant, request)
    if output.json:
        print_json(to_json(answer))
        return
    cost = to_json(answer.counters)
    click.echo(
        f"batch {batch}, length {length}: ready; {cost['compiles']} compiles, {cost['program_loads']} program loads, "
        f"{cost['workspaces']} workspaces"
    )


def _make_ahead(
    checkpoint: Path, config: Path | None, overrides: Mapping[str, object], shape: tuple[int, int] | None
) -> BuiltPrograms | None:
    """What was built of a configuration's shapes, or of the one given. Raises ClientError."""
    try:
        from rowlock.bindings.checkpoint.errors import CheckpointError  # noqa: PLC0415
        from rowlock.bindings.device import DeviceError, Variant  # noqa: PLC0415
        from rowlock.daemon.ahead import make_ahead  # noqa: PLC0415
        from rowlock.daemon.config import ConfigError, build_settings, read_config  # noqa: PLC0415
        from rowlock.daemon.environments import DeviceRefusedError  # noqa: PLC0415
    except ImportError as error:
        raise ClientError(
            f"the daemon's packages are not installed: {error}", EXIT_REFUSED, "pip install 'rowlock[daemon]'"
        ) from error
    try:
        settings = build_settings(read_config(config) if config else {}, overrides)
        return make_ahead(settings, checkpoint, (Variant(*shape),) if shape else settings.variants)
    except ConfigError as error:
        raise ClientError(str(error), EXIT_USAGE, "docs/configuration.md lists every key") from error
    except CheckpointError as error:
        raise ClientError(str(error), EXIT_REFUSED, error.hint, error.fault.value) from error
    except OwnerError as error:
        raise ClientError(str(error), REASONS[error.reason].exit_code, error.hint, error.reason.value) from error
    except (DeviceRefusedError, DeviceError) as error:
        raise ClientError(str(error), EXIT_REFUSED) from error


def _show(made: BuiltPrograms | None, output: Output) -> None:
    if output.json:
        programs = dict(made.programs) if made else {}
        directory = str(made.directory) if made else None
        print_json({"programs": programs, "built": made.built if made else 0, "directory": directory})
    elif made is None:
        click.echo("this device has no programs to build ahead: any shape runs at any time")
    else:
        for name, digest in made.programs.items():
            click.echo(f"{name}  {digest}")
        click.echo(f"{len(made.programs)} programs in {made.directory}, {made.built} of them built now")
