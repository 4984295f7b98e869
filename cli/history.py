"""``rowlock history``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from rowlock.cli.audit import pages_of_daemon, pages_of_directory, parse_head, report
from rowlock.cli.client import Client
from rowlock.cli.options import Output, client_options
from rowlock.cli.render import level_name, print_json, record_lines, short, state_name, to_json
from rowlock.journal.audit import Auditor
from rowlock.journal.chain import Head
from rowlock.v1 import owner_pb2

EXIT_MISMATCH = 7


class _HeadType(click.ParamType[Head]):
    name = "head"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Head:
        try:
            return parse_head(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("transition", required=False)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@click.option(
    "--head", is_flag=True, help="Print how far the journal's hash chain has come, and the owner's public key."
)
@click.option(
    "--verify", is_flag=True, help="Check the hash chain, its signatures and what they bind; here, not there."
)
@click.option(
    "--owner", "of_owner", is_flag=True, help="Events of the owner itself: keys, drift, quarantine, retention cuts."
)
@click.option("--since", type=_HeadType(), help="With --verify: a head that was noted before, COUNT:LINK.")
@click.option(
    "--key", "keys", multiple=True, help="With --verify: a public key that may have signed; no other then may."
)
@click.option(
    "--state", type=click.Path(path_type=Path), help="With --verify: read this state directory, and ask no daemon."
)
@client_options
def command(
    client: Client,
    output: Output,
    transition: str | None,
    limit: int,
    head: bool,
    of_owner: bool,
    verify: bool,
    since: Head | None,
    keys: tuple[str, ...],
    state: Path | None,
) -> int:
    """Transitions, newest first; or one of them in full, by its id or request id."""
    if head + verify + of_owner + bool(transition) > 1:
        raise click.UsageError("a transition, --head, --owner and --verify exclude each other")
    if (since or keys or state) and not verify:
        raise click.UsageError("--since, --key and --state go with --verify")
    if verify:
        auditor = Auditor(frozenset(keys), since)
        auditor.check(pages_of_directory(state) if state else pages_of_daemon(client))
        return _show_audit(output, auditor)
    if of_owner:
        _show_owner(client, output)
    elif head:
        _show_head(client, output)
    elif transition:
        _show_one(client, output, transition)
    else:
        _show_list(client, output, limit)
    return 0


def _show_list(client: Client, output: Output, limit: int) -> None:
    answer = client.call(client.owner.ListTransitions, owner_pb2.ListTransitionsRequest(limit=limit))
    if output.json:
        print_json([to_json(record) for record in answer.records])
        return
    for record in answer.records:
        when = record.created.ToDatetime(UTC).strftime("%Y-%m-%d %H:%M:%S")
        click.echo(
            f"{when}Z  {record.id}  {record.kind:<10} {level_name(record.level):<4} {state_name(record.state):<11} "
            f"generation {record.generation or '-'}  {short(record.to)}"
            + (f"  {record.reason}" if record.reason else "")
        )


def _show_one(client: Client, output: Output, transition: str) -> None:
    answer = client.call(client.owner.GetTransition, owner_pb2.GetTransitionRequest(id=transition))
    if output.json:
        print_json(to_json(answer))
        return
    click.echo("\n".join(record_lines(answer.record)))
    for event in answer.events:
        click.echo(f"  {event.sequence:>3} {state_name(event.state):<12} {event.message}")


def _show_head(client: Client, output: Output) -> None:
    answer = client.call(client.owner.GetHistoryHead, owner_pb2.GetHistoryHeadRequest())
    if output.json:
        print_json(to_json(answer))
        return
    click.echo(answer.head)
    output.progress(f"public key {answer.public_key}; {Head.parse(answer.head).count} events")


def _show_owner(client: Client, output: Output) -> None:
    """Oldest first: they are few."""
    answers = client.stream(client.owner.ReadHistory, owner_pb2.ReadHistoryRequest())
    events = [item.event for item in answers if item.HasField("event") and not item.event.transition]
    if output.json:
        print_json(
            [{name: getattr(event, name) for name in ("position", "state", "time", "message")} for event in events]
        )
        return
    for event in events:
        when = datetime.fromtimestamp(event.time, UTC).strftime("%Y-%m-%d %H:%M:%S")
        click.echo(f"{when}Z  {event.position:>6}  {event.state:<11} {event.message}")


def _show_audit(output: Output, auditor: Auditor) -> int:
    result = report(auditor)
    if output.json:
        print_json(result)
    else:
        verdict = "as it was written" if result["ok"] else "NOT as it was written"
        click.echo(f"{auditor.head.count} events: {verdict}")
        click.echo(f"  head       {auditor.head}")
        click.echo(f"  signed     up to event {auditor.signed}, by {', '.join(auditor.keys) or 'nobody'}")
        for problem in auditor.problems:
            click.echo(f"  {problem.fault:<10} {problem.detail}")
    return 0 if result["ok"] else EXIT_MISMATCH
