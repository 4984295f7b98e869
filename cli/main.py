"""``rowlock``: the group, and the process's edge."""

from __future__ import annotations

import importlib
import sys
from typing import Final

import click

import rowlock
from rowlock.cli.client import EXIT_INTERRUPTED, ClientError

COMMANDS: Final = {
    "cancel": "End the open transition before its first device write.",
    "convert": "Turn a GGUF file into a bf16 checkpoint directory.",
    "demo": "Show the main job on a real model, from start to end.",
    "describe": "Device, allocations and counters of the owner.",
    "doctor": "What an owner needs on this machine, and what is missing.",
    "generate": "Generate text with the resident model.",
    "history": "Transitions, newest first; or one of them in full.",
    "manifest": "Digest a checkpoint directory.",
    "plan": "What a transition to a checkpoint would do. Changes nothing.",
    "prefill-worker": "Compute prompts for an owner; the owner starts it.",
    "release": "Release a quarantined device; the daemon ends.",
    "rollback": "Go back to the identity of an earlier generation.",
    "serve": "Run the owner daemon of one device.",
    "status": "What the owner is doing.",
    "transition": "Move the owner to a checkpoint, as a transaction.",
    "unload": "Close the model; the owner is EMPTY.",
    "prepare": "Be ready for requests of a shape, or build programs ahead.",
    "verify": "Read the whole model back and compare it with its identity.",
}


class _LazyGroup(click.Group):
    """Imports a command only when it is used: the client commands stay quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"rowlock.cli.{name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(rowlock.__version__, prog_name="rowlock")
def group() -> None:
    """Change the weights of a live model, as a transaction.

    Exit codes: 0 done, 2 usage, 3 refused, 4 rolled back, 5 unloaded, 6 quarantined,
    7 verify mismatch, 8 unreachable or timed out, 9 cancelled or failed with nothing
    written, 130 interrupted.
    """


def main() -> None:
    """The entry point: every error ends in one message and its exit code."""
    try:
        code = group(standalone_mode=False)
    except ClientError as error:
        click.echo(f"error: {error}", err=True)
        if error.hint:
            click.echo(f"  try: {error.hint}", err=True)
        code = error.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted; a transition that has begun goes on: `rowlock history` shows it", err=True)
        code = EXIT_INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)
