"""The owner's state again and again: in place on a terminal, a line at a time elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click
import grpc

from rowlock.cli.client import Client
from rowlock.cli.options import Output
from rowlock.cli.render import print_json, short, to_json
from rowlock.v1 import owner_pb2

Lines = Callable[[owner_pb2.Owner], list[str]]


def watch(client: Client, output: Output, interval_s: float, lines: Lines) -> None:
    """Show the owner until Ctrl-C. Raises ClientError when it is gone.

    Args:
        client: of the daemon.
        output: JSON Lines, or text.
        interval_s: between two looks.
        lines: writes an owner for a person.

    """
    show = _Screen(lines).show if sys.stdout.isatty() and not output.json else _print_json if output.json else _print
    rate = _Rate()
    with suppress(KeyboardInterrupt), _changes(client) as changed:
        while True:
            changed.clear()
            described = client.call(client.owner.Describe, owner_pb2.DescribeRequest())
            show(described, rate.of(described.owner))
            changed.wait(interval_s)


class _Rate:
    """Tokens a second between two looks."""

    def __init__(self) -> None:
        self._before: tuple[str, int, float] | None = None

    def of(self, owner: owner_pb2.Owner) -> float:
        before, now = self._before, time.monotonic()
        self._before = owner.epoch, owner.tokens, now
        if before is None or before[0] != owner.epoch or now <= before[2]:
            return 0.0
        return (owner.tokens - before[1]) / (now - before[2])


class _Screen:
    """Writes over what it wrote before."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._shown = 0

    def show(self, described: owner_pb2.DescribeResponse, tokens_per_s: float) -> None:
        lines = [*self._lines(described.owner), f"  cache      {cache_use(described.cache)}"]
        lines.append(f"  tokens     {described.owner.tokens}, {tokens_per_s:.1f} a second")
        back = f"\x1b[{self._shown}A\x1b[J" if self._shown else ""
        click.echo(back + "\n".join(lines))
        self._shown = len(lines)


def cache_use(cache: owner_pb2.Cache) -> str:
    """Pages of each group for a person."""
    groups = [f"{group.in_use} of {group.pages} pages in use, {group.cached} kept" for group in cache.groups]
    return "; ".join(groups) or "no pages"


def _print(described: owner_pb2.DescribeResponse, tokens_per_s: float) -> None:
    owner = described.owner
    state = owner_pb2.OwnerState.Name(owner.state).removeprefix("OWNER_STATE_")
    click.echo(
        f"{owner.device} {state} {short(owner.identity)} generation {owner.generation}; "
        f"{owner.requests_active} active, {owner.requests_waiting} waiting; "
        f"{tokens_per_s:.1f} tokens a second; {cache_use(described.cache)}"
    )


def _print_json(described: owner_pb2.DescribeResponse, tokens_per_s: float) -> None:
    cache = to_json(described.cache) if described.HasField("cache") else None
    print_json({**to_json(described.owner), "cache": cache, "tokens_per_s": round(tokens_per_s, 3)})


@contextmanager
def _changes(client: Client) -> Iterator[threading.Event]:
    """Yields an event that is set whenever the owner's state changes, or it goes away."""
    changed = threading.Event()
    call = client.owner.WatchOwner(owner_pb2.WatchOwnerRequest())

    def follow() -> None:
        with suppress(grpc.RpcError):
            for _ in call:
                changed.set()
        changed.set()

    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield changed
    finally:
        call.cancel()
        follower.join()
