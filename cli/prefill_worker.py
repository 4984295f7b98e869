"""``rowlock prefill-worker``: the process that computes prompts for an owner; the owner starts it."""

from __future__ import annotations

import socket
from pathlib import Path

import click

from rowlock.cli.client import EXIT_REFUSED, ClientError
from rowlock.daemon.prefill.engine import DEFAULT_WIDTHS


def _widths(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers") from None


def _extra(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for name, equals, _ in pairs:
        if not (name and equals):
            raise click.BadParameter(f"{name!r}: wanted is NAME=VALUE")
    return {name: value for name, _, value in pairs}


@click.command()
@click.option("--socket-fd", type=int, required=True, help="Descriptor of the socket to the owner.")
@click.option("--parent", type=int, required=True, help="Process id of the owner: this process ends with it.")
@click.option("--factory", required=True, help="module:function that makes the engine.")
@click.option("--checkpoint", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--widths", default=",".join(map(str, DEFAULT_WIDTHS)), show_default=True, callback=_widths)
@click.option("--memory-max", type=click.IntRange(min=1), default=2**32, show_default=True, help="Bytes of one answer.")
@click.option(
    "--pace-ms", type=click.FloatRange(min=0), default=0.0, help="Benchmarks: each layer takes so long, from memory."
)
@click.option("--option", "extra", multiple=True, callback=_extra, help="NAME=VALUE for the factory.")
def command(
    socket_fd: int,
    parent: int,
    factory: str,
    checkpoint: Path,
    device: str,
    threads: int,
    widths: tuple[int, ...],
    memory_max: int,
    pace_ms: float,
    extra: dict[str, str],
) -> None:
    """Compute prompts for the owner that started this process, on another device or in another environment.

    Not for hand use: `rowlock serve --prefill subprocess` starts it.
    """
    from rowlock.bindings.children import end_with_parent  # noqa: PLC0415
    from rowlock.daemon.prefill.engine import EngineOptions, load_factory  # noqa: PLC0415
    from rowlock.daemon.prefill.pacing import PacedEngine  # noqa: PLC0415
    from rowlock.daemon.prefill.protocol.frames import FrameError  # noqa: PLC0415
    from rowlock.daemon.prefill.protocol.link import Link  # noqa: PLC0415
    from rowlock.daemon.prefill.worker import Worker  # noqa: PLC0415

    try:
        end_with_parent(parent)
        link = Link(socket.socket(fileno=socket_fd))
        engine = load_factory(factory)(EngineOptions(checkpoint, device, threads, widths, extra))
        if pace_ms:
            engine = PacedEngine(engine, pace_ms / 1000)
        Worker(link, engine, memory_max).run()
    except (FrameError, OSError, ValueError) as error:
        raise ClientError(str(error), EXIT_REFUSED) from error
