"""``rowlock serve``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from rowlock.cli.client import EXIT_REFUSED, ClientError, default_endpoint


def _default_state(device: str) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path("~/.local/state").expanduser()
    return Path(base) / "rowlock" / device.replace(":", "-")


@click.command()
@click.option("--device", default="cpu", show_default=True)
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, resolve_path=True),
    help="Loaded on a first start. Later starts load what was published last.",
)
@click.option("--state", type=click.Path(path_type=Path, resolve_path=True), help="State directory.")
@click.option("--socket", type=click.Path(path_type=Path), help="Unix socket of the API.")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    default=lambda: os.cpu_count() or 1,
    show_default="all cores",
    help="Threads of one device operation, and of hashing.",
)
@click.option("--test-fault-file", type=click.Path(path_type=Path, resolve_path=True), hidden=True)
def command(
    device: str, checkpoint: Path | None, state: Path | None, socket: Path | None, threads: int,
    test_fault_file: Path | None,
) -> None:  # fmt: skip
    """Run the owner daemon of one device.

    Ends on SIGTERM or SIGINT.
    """
    try:
        # torch is in the 'daemon' extra; the client commands do without.
        from rowlock.daemon.devices import UnknownDeviceError  # noqa: PLC0415
        from rowlock.daemon.lock import DeviceLockedError  # noqa: PLC0415
        from rowlock.daemon.service import run  # noqa: PLC0415
        from rowlock.daemon.settings import Settings  # noqa: PLC0415
        from rowlock.journal.journal import JournalError  # noqa: PLC0415
    except ImportError as error:
        raise ClientError(
            f"the daemon's packages are not installed: {error}", EXIT_REFUSED, "pip install 'rowlock[daemon]'"
        ) from error
    path = socket or Path(default_endpoint().removeprefix("unix:")).with_name(f"{device.replace(':', '-')}.sock")
    settings = Settings(
        device=device,
        state=state or _default_state(device),
        socket=path.absolute(),
        checkpoint=checkpoint,
        threads=threads,
        fault_file=test_fault_file,
    )
    try:
        run(settings)
    except (DeviceLockedError, JournalError, UnknownDeviceError, OSError) as error:
        raise ClientError(str(error), EXIT_REFUSED) from error
