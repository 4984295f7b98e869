"""The process that stages: ``python -m rowlock.daemon.staging.child LINK PARENT THREADS``.

It does what it is told until the other end is closed, and ends with its owner, whatever happens to that.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any, Final

from rowlock.bindings.children import end_with_parent
from rowlock.daemon.staging.orders import Answer, Desk, Done, Failed, Order, Step

ORDERS_AT_ONCE: Final = 4
"""A parent is settled while the next one's image is awaited; so few are enough."""


class Worker:
    """Carries out orders as they come, and answers each.

    Args:
        link: to the owner.
        desk: to work at.

    """

    def __init__(self, link: Connection[Answer, Any], desk: Desk) -> None:
        self._link = link
        self._desk = desk
        self._sending = threading.Lock()

    def run(self) -> None:
        """Until the other end is closed."""
        with ThreadPoolExecutor(ORDERS_AT_ONCE) as orders:
            while True:
                try:
                    number, order, count = self._link.recv()
                except EOFError:
                    os._exit(0)  # what is half done is nobody's any more
                descriptors = [recv_handle(self._link) for _ in range(count)]
                orders.submit(self._serve, number, order, descriptors)

    def _serve(self, number: int, order: Order, descriptors: Sequence[int]) -> None:
        try:
            result = order.carry_out(self._desk, descriptors, lambda count: self._send(Step(number, count)))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the owner gets it
            self._send(Failed(number, error))
        else:
            self._send(Done(number, result))

    def _send(self, answer: Answer) -> None:
        with self._sending:
            try:
                self._link.send(answer)
            except OSError:
                os._exit(0)


def main() -> None:
    link, parent, threads = (int(argument) for argument in sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its owner decides
    end_with_parent(parent)
    with ThreadPoolExecutor(threads) as executor:
        Worker(Connection(link), Desk(executor)).run()


if __name__ == "__main__":
    main()
