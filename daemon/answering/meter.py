"""Requests in numbers, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram


@dataclass(frozen=True)
class MetricInfo:
    """One metric, as docs/metrics.md lists it.

    Attributes:
        kind: ``counter``, ``gauge`` or ``histogram``. A counter's samples end in ``_total``.
        labels: names of its labels.

    """

    kind: str
    text: str
    labels: tuple[str, ...] = ()


REQUEST_METRICS: Final[dict[str, MetricInfo]] = {
    "rowlock_requests": MetricInfo(
        "counter",
        "Requests for generation that have ended: `stop`, `length`, or the reason for which they failed",
        ("api", "outcome"),
    ),
    "rowlock_prompt_tokens": MetricInfo("counter", "Prompt tokens of admitted requests", ("api",)),
    "rowlock_generated_tokens": MetricInfo("counter", "Tokens that were computed and sent", ("api",)),
    "rowlock_first_token_seconds": MetricInfo(
        "histogram", "From the arrival of a request to its first token, waiting included", ("api",)
    ),
    "rowlock_token_seconds": MetricInfo("histogram", "From one token of an answer to the next", ("api",)),
}
FIRST_TOKEN_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 5)


class Meter:
    """Counts requests in a registry of its owner's.

    Args:
        registry: holds the metrics.
        monotonic: seconds.

    """

    def __init__(self, registry: CollectorRegistry, monotonic: Callable[[], float]) -> None:
        def arguments(name: str) -> tuple[str, str, tuple[str, ...]]:
            return name, REQUEST_METRICS[name].text, REQUEST_METRICS[name].labels

        self.monotonic = monotonic
        self.requests = Counter(*arguments("rowlock_requests"), registry=registry)
        self.prompt_tokens = Counter(*arguments("rowlock_prompt_tokens"), registry=registry)
        self.tokens = Counter(*arguments("rowlock_generated_tokens"), registry=registry)
        self.first_token = Histogram(
            *arguments("rowlock_first_token_seconds"), registry=registry, buckets=FIRST_TOKEN_BUCKETS
        )
        self.token = Histogram(*arguments("rowlock_token_seconds"), registry=registry, buckets=TOKEN_BUCKETS)

    def begin(self, api: str) -> Measurement:
        """Measure one request, which has just arrived by ``grpc`` or ``http``."""
        return Measurement(self, api)


class Measurement:
    """One request, from its arrival to its end."""

    def __init__(self, meter: Meter, api: str) -> None:
        self._meter = meter
        self._api = api
        self._last = meter.monotonic()
        self._tokens = 0

    def started(self, prompt_tokens: int) -> None:
        self._meter.prompt_tokens.labels(self._api).inc(prompt_tokens)

    def token(self) -> None:
        now = self._meter.monotonic()
        histogram = self._meter.token if self._tokens else self._meter.first_token
        histogram.labels(self._api).observe(now - self._last)
        self._last, self._tokens = now, self._tokens + 1

    def ended(self, outcome: str) -> None:
        self._meter.tokens.labels(self._api).inc(self._tokens)
        self._meter.requests.labels(self._api, outcome).inc()
