"""A client that asks for one token, over and over: what a transition looks like from outside."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from types import TracebackType
from typing import Self

from rowlock.cli.client import Client
from rowlock.v1 import inference_pb2


class Probe:
    """Runs inside a ``with`` block, in a thread of its own.

    Attributes:
        answers: (monotonic seconds at the end of the answer, identity digest, text).

    """

    def __init__(self, client: Client, prompt: str) -> None:
        self._client = client
        self._prompt = prompt
        self._stop = threading.Event()
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: Exception | None = None
        self.answers: list[tuple[float, str, str]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._first.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def longest_gap_ms(self) -> float:
        """Longest time between the ends of two answers."""
        return round(max(self._gaps(), default=0.0), 1)

    @property
    def usual_gap_ms(self) -> float:
        return round(statistics.median(self._gaps()), 1) if len(self.answers) > 1 else 0.0

    def texts(self) -> dict[str, set[str]]:
        """The answers that each identity gave."""
        found: dict[str, set[str]] = {}
        for _, identity, text in self.answers:
            found.setdefault(identity, set()).add(text)
        return found

    def _gaps(self) -> list[float]:
        times = [moment for moment, _, _ in self.answers]
        return [(after - before) * 1000 for before, after in itertools.pairwise(times)]

    def _run(self) -> None:
        try:
            while True:
                request = inference_pb2.GenerateRequest(prompt=self._prompt, max_tokens=1)
                messages = list(self._client.stream(self._client.inference.Generate, request))
                text = "".join(message.text for message in messages)
                self.answers.append((time.monotonic(), messages[-1].identity.digest, text))
                self._first.set()
                if self._stop.is_set():
                    return
        except Exception as error:  # noqa: BLE001 - raised again where the block ends
            self._error = error
        finally:
            self._first.set()
