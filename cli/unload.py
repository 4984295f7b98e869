"""``rowlock unload``."""

from __future__ import annotations

import click

from rowlock.cli.client import OUTCOME_EXIT, Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.targets import precondition_options, show_events, transition_options
from rowlock.v1 import owner_pb2

EXIT_UNLOADED = OUTCOME_EXIT[owner_pb2.TRANSITION_STATE_UNLOADED]


@click.command()
@precondition_options
@transition_options
@client_options
def command(client: Client, output: Output, request_id: str, etag: str, options: owner_pb2.TransitionOptions) -> int:
    """Close the model; the owner is EMPTY until the next transition or restart."""
    request = owner_pb2.UnloadRequest(request_id=request_id, etag=etag, options=options)
    answers = client.stream(client.owner.Unload, request)
    code = show_events((answer.event for answer in answers), output)
    return 0 if code == EXIT_UNLOADED else code
