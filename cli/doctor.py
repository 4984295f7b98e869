"""``rowlock doctor``."""

from __future__ import annotations

from pathlib import Path

import click

from rowlock.cli.client import EXIT_REFUSED, ClientError
from rowlock.cli.options import Output, output_options
from rowlock.cli.render import print_json


@click.command()
@click.option("--config", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="TOML configuration.")
@click.option("--device", help="[default: cpu]")
@click.option("--state", type=click.Path(path_type=Path, resolve_path=True), help="State directory.")
@click.option("--without-hardware", is_flag=True, default=None, help="Look for what is needed where there is no card.")
@output_options
def command(
    config: Path | None, device: str | None, state: Path | None, without_hardware: bool | None, output: Output
) -> int:
    """Look at what an owner needs on this machine; changes nothing. Needs no daemon."""
    try:
        from rowlock.daemon.config import ConfigError, build_settings, read_config  # noqa: PLC0415
        from rowlock.daemon.doctor import examine  # noqa: PLC0415
    except ImportError as error:
        raise ClientError(
            f"the daemon's packages are not installed: {error}", EXIT_REFUSED, "pip install 'rowlock[daemon]'"
        ) from error
    try:
        overrides = {"device": device, "state": state, "without_hardware": without_hardware}
        settings = build_settings(read_config(config) if config else {}, overrides)
    except ConfigError as error:
        raise ClientError(str(error), 2) from error
    findings = list(examine(settings))
    ok = all(finding.ok for finding in findings)
    if output.json:
        print_json({"ok": ok, "findings": [vars(finding) for finding in findings]})
    else:
        for finding in findings:
            click.echo(f"{'ok  ' if finding.ok else 'BAD '} {finding.name:<13} {finding.detail}")
    return 0 if ok else EXIT_REFUSED
