"""Options that every client command takes, after its name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from rowlock.cli.client import Client, ClientError, default_endpoint
from rowlock.cli.render import print_json

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Output:
    """Where things go: the answer to stdout, progress to stderr."""

    json: bool
    quiet: bool

    def progress(self, text: str) -> None:
        if not self.quiet:
            click.echo(text, err=True)

    @property
    def bar(self) -> bool:
        """Whether a progress bar may be drawn."""
        return not self.quiet and sys.stderr.isatty()


def output_options(command: F) -> F:
    """``--json`` and ``--quiet``; the command gets an :class:`Output` as ``output``."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON document (or JSON Lines for streams).")
    @click.option("--quiet", "-q", is_flag=True, help="No progress on stderr.")
    @functools.wraps(command)
    def wrapper(*args: Any, as_json: bool, quiet: bool, **kwargs: Any) -> Any:
        try:
            return command(*args, output=Output(as_json, quiet), **kwargs)
        except ClientError as error:
            if as_json:
                print_json({"error": {"message": str(error), "reason": error.reason, "hint": error.hint}})
            raise

    return wrapper  # type: ignore[return-value]


def client_options(command: F) -> F:
    """``--endpoint`` and ``--timeout``, and the output options; the command gets ``client`` too."""

    @click.option(
        "--endpoint",
        envvar="ROWLOCK_ENDPOINT",
        default=default_endpoint,
        show_default="the cpu owner's socket",
        help="unix:PATH of the daemon.",
    )
    @click.option("--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds to wait; then detach.")
    @output_options
    @functools.wraps(command)
    def wrapper(*args: Any, endpoint: str, timeout: float | None, **kwargs: Any) -> Any:
        client = Client(endpoint, timeout)
        try:
            return command(*args, client=client, **kwargs)
        finally:
            client.close()

    return wrapper  # type: ignore[return-value]
