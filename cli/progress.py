"""A progress bar on stderr, only where somebody can see it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from click.termui import progressbar

from rowlock.cli.options import Output


@contextmanager
def progress_bar(output: Output, total: int, label: str) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of bytes just done; callable from any thread."""
    if not output.bar:
        yield lambda _count: None
        return
    lock = threading.Lock()
    with progressbar(length=total, label=label, file=sys.stderr) as bar:

        def advance(count: int) -> None:
            with lock:
                bar.update(count)

        yield advance
