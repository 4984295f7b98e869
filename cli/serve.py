"""``rowlock serve``."""

from __future__ import annotations

from pathlib import Path

import click

from rowlock.cli.client import EXIT_REFUSED, ClientError
from rowlock.daemon.prefill.protocol.hello import LAYERS_MAX

EXIT_USAGE = 2


@click.command()
@click.option("--config", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="TOML configuration.")
@click.option("--check-config", is_flag=True, help="Check the configuration, and end.")
@click.option("--device", help="[default: cpu]")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, resolve_path=True),
    help="Loaded on a first start. Later starts load what was published last.",
)
@click.option("--state", type=click.Path(path_type=Path, resolve_path=True), help="State directory.")
@click.option("--socket", type=click.Path(path_type=Path, resolve_path=True), help="Unix socket of the API.")
@click.option(
    "--http",
    is_flag=False,
    flag_value="127.0.0.1:8000",
    metavar="[HOST:PORT]",
    help="Serve the OpenAI-compatible API too. [without a value: 127.0.0.1:8000]",
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    help="Threads of one device operation, and of hashing. [default: all cores]",
)
@click.option(
    "--without-hardware",
    is_flag=True,
    default=None,
    help="Where there is no card, the vendor's software in its place will do; `describe` says so.",
)
@click.option(
    "--prefill",
    type=click.Choice(["none", "subprocess"]),
    help="Who computes prompts: the owner itself, or a process that it starts. [default: none]",
)
@click.option(
    "--prefill-stream-layers",
    type=click.IntRange(1, LAYERS_MAX),
    help="With --prefill subprocess: import K/V every so many layers. [default: all of it at the end]",
)
@click.option("--test-fault-file", type=click.Path(path_type=Path, resolve_path=True), hidden=True)
@click.option("--test-kill-file", type=click.Path(path_type=Path, resolve_path=True), hidden=True)
@click.option("--test-placement-file", type=click.Path(path_type=Path, resolve_path=True), hidden=True)
def command(
    config: Path | None,
    check_config: bool,
    device: str | None,
    checkpoint: Path | None,
    state: Path | None,
    socket: Path | None,
    http: str | None,
    threads: int | None,
    without_hardware: bool | None,
    prefill: str | None,
    prefill_stream_layers: int | None,
    test_fault_file: Path | None,
    test_kill_file: Path | None,
    test_placement_file: Path | None,
) -> None:
    """Run the owner daemon of one device.

    Options here come before those of the file. Ends on SIGTERM or SIGINT.
    """
    try:
        # torch is in the 'daemon' extra; the client commands do without.
        from rowlock.bindings.device import DeviceError  # noqa: PLC0415
        from rowlock.daemon.config import ConfigError, build_settings, read_config  # noqa: PLC0415
        from rowlock.daemon.environments import DeviceRefusedError  # noqa: PLC0415
        from rowlock.daemon.lock import DeviceLockedError  # noqa: PLC0415
        from rowlock.daemon.service import run  # noqa: PLC0415
        from rowlock.journal.journal_file import JournalError  # noqa: PLC0415
    except ImportError as error:
        raise ClientError(
            f"the daemon's packages are not installed: {error}", EXIT_REFUSED, "pip install 'rowlock[daemon]'"
        ) from error
    overrides = {
        "device": device,
        "checkpoint": checkpoint,
        "state": state,
        "socket": socket,
        "http": http,
        "threads": threads,
        "fault_file": test_fault_file,
        "kill_file": test_kill_file,
        "placement_file": test_placement_file,
        "without_hardware": without_hardware,
        "prefill": prefill,
        "prefill_stream_layers": prefill_stream_layers,
    }
    try:
        settings = build_settings(read_config(config) if config else {}, overrides)
    except ConfigError as error:
        raise ClientError(str(error), EXIT_USAGE, "docs/configuration.md lists every key") from error
    if check_config:
        click.echo(f"{config or 'the defaults'}: good")
        return
    try:
        run(settings)
    except (DeviceLockedError, JournalError, DeviceRefusedError, DeviceError, OSError) as error:
        raise ClientError(str(error), EXIT_REFUSED) from error
