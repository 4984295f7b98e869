"""The owner in numbers, for Prometheus: read from its view and its journal at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

import rowlock
from rowlock.daemon.answering.meter import MetricInfo
from rowlock.daemon.owner.owner import Owner
from rowlock.daemon.owner.prefilling import SourceView
from rowlock.daemon.owner.record import TransitionRecord
from rowlock.daemon.owner.states import OwnerState
from rowlock.daemon.owner.view import OwnerView

OWNER_METRICS: Final[dict[str, MetricInfo]] = {
    "rowlock_info": MetricInfo("gauge", "1; who serves", ("version", "device", "binding")),
    "rowlock_identity_info": MetricInfo(
        "gauge",
        "1; the resident identity, none while nothing is resident",
        ("identity", "program", "assets", "weights", "checkpoint"),
    ),
    "rowlock_generation": MetricInfo("gauge", "The resident generation; 0 while nothing is resident"),
    "rowlock_state": MetricInfo("gauge", "1 for the owner's state, 0 for the others", ("state",)),
    "rowlock_ready": MetricInfo("gauge", "1 when requests are answered"),
    "rowlock_requests_active": MetricInfo("gauge", "Requests that compute"),
    "rowlock_requests_waiting": MetricInfo("gauge", "Requests that wait for admission"),
    "rowlock_computed_tokens": MetricInfo("counter", "Tokens computed for requests"),
    "rowlock_prefix_hit_tokens": MetricInfo(
        "counter", "Prompt tokens found in pages of earlier prompts since the model was loaded"
    ),
    "rowlock_preemptions": MetricInfo("counter", "Requests that gave their pages up, to compute them again"),
    "rowlock_model_steps": MetricInfo("counter", "Steps of the model"),
    "rowlock_cache_pages": MetricInfo(
        "gauge",
        "Pages of keys and values of the layers that look `window` positions far (0: all): "
        "`in_use`, `cached`, `free`, `quarantined`",
        ("window", "use"),
    ),
    "rowlock_cache_bytes": MetricInfo("gauge", "Bytes of all pages"),
    "rowlock_resident_bytes": MetricInfo("gauge", "Bytes of the resident weights"),
    "rowlock_drift_rows": MetricInfo("gauge", "Resident rows known to differ from the published identity"),
    "rowlock_device_operations": MetricInfo(
        "counter", "What crossed the device boundary, as `counters` of `rowlock describe`", ("operation",)
    ),
    "rowlock_device_written_bytes": MetricInfo("counter", "Bytes written to the device"),
    "rowlock_device_read_back_bytes": MetricInfo("counter", "Bytes read back from the device"),
    "rowlock_source_state": MetricInfo(
        "gauge",
        "1 for the state of the prompts' source, 0 for the others; `NONE`: prompts are computed here",
        ("state",),
    ),
    "rowlock_source_restarts": MetricInfo("counter", "How often the prompts' source was started again"),
    "rowlock_prefill_prompts": MetricInfo(
        "counter", "Prompts that were to come from a source: `imported`, `failed`, or `computed_here`", ("outcome",)
    ),
    "rowlock_prefill_imported_bytes": MetricInfo("counter", "Bytes of K/V imported from a source"),
    "rowlock_transitions": MetricInfo("counter", "Transitions that have ended", ("outcome",)),
    "rowlock_last_pause_seconds": MetricInfo(
        "gauge", "For how long no request ran in the newest transition that wrote to the device", ("level", "outcome")
    ),
}
OPERATIONS: Final = ("uploads", "program_loads", "compiles", "allocations", "native_calls", "executions", "parses")
PAGE_USES: Final = ("in_use", "cached", "free", "quarantined")
SOURCE_STATES: Final = ("STARTING", "READY", "ABSENT", "NONE")
LOOKED_AT_MAX: Final = 20
"""Transitions that are looked through for one that wrote."""

Family: TypeAlias = GaugeMetricFamily | CounterMetricFamily
Sample: TypeAlias = tuple[tuple[str, ...], float]


class OwnerMetrics(Collector):
    """What the owner's view and journal say when somebody asks."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner

    def describe(self) -> Iterator[Family]:
        """Names for the registry, which needs no owner to be ready for that."""
        for name in OWNER_METRICS:
            yield _family(name, [])

    def collect(self) -> Iterator[Family]:
        view = self._owner.view
        for name, samples in (*_of_view(view), *_of_source(view.source), *_of_journal(self._owner)):
            yield _family(name, samples)


def _of_view(view: OwnerView) -> Iterator[tuple[str, list[Sample]]]:
    resident, counters = view.resident, view.counters
    facts = (rowlock.__version__, view.facts.device, view.facts.binding)
    yield "rowlock_info", [(facts, 1)]
    if resident is not None:
        identity = resident.model.identity
        labels = (identity.digest, identity.program, identity.assets, identity.weights, resident.model.checkpoint)
        yield "rowlock_identity_info", [(labels, 1)]
    yield "rowlock_state", [((state.value,), float(state is view.state)) for state in OwnerState]
    yield "rowlock_device_operations", [((name,), getattr(counters, name)) for name in OPERATIONS]
    yield (
        "rowlock_cache_pages",
        [((str(group.window), use), getattr(group, use)) for group in view.cache.groups for use in PAGE_USES],
    )
    single: dict[str, float] = {
        "rowlock_generation": resident.generation if resident else 0,
        "rowlock_ready": view.serving,
        "rowlock_requests_active": len(view.leases),
        "rowlock_requests_waiting": view.requests_waiting,
        "rowlock_computed_tokens": view.tokens,
        "rowlock_prefix_hit_tokens": view.cache.hit_tokens,
        "rowlock_preemptions": view.served.preemptions,
        "rowlock_model_steps": view.served.steps,
        "rowlock_cache_bytes": view.cache.nbytes,
        "rowlock_resident_bytes": resident.model.layout.nbytes if resident else 0,
        "rowlock_drift_rows": sum(rows for _tensor, _first, rows in view.drift),
        "rowlock_device_written_bytes": counters.bytes_written,
        "rowlock_device_read_back_bytes": counters.bytes_read_back,
    }
    for name, value in single.items():
        yield name, [((), value)]


def _of_source(source: SourceView | None) -> Iterator[tuple[str, list[Sample]]]:
    source = source or SourceView("NONE", "", 0, 0, "", "", 0)
    yield "rowlock_source_state", [((state,), float(state == source.state)) for state in SOURCE_STATES]
    yield "rowlock_source_restarts", [((), source.restarts)]
    counters = source.counters
    outcomes = {"imported": counters.remote, "failed": counters.failed, "computed_here": counters.fallbacks}
    yield "rowlock_prefill_prompts", [((outcome,), count) for outcome, count in outcomes.items()]
    yield "rowlock_prefill_imported_bytes", [((), counters.bytes)]


def _of_journal(owner: Owner) -> Iterator[tuple[str, list[Sample]]]:
    yield "rowlock_transitions", [((outcome,), count) for outcome, count in sorted(owner.journal.outcomes().items())]
    for row in owner.journal.transitions(LOOKED_AT_MAX):
        record = TransitionRecord.from_json(row.record)
        if record.exclusive_ms:
            labels = (record.level, record.state)
            yield "rowlock_last_pause_seconds", [(labels, record.exclusive_ms / 1000)]
            return


def _family(name: str, samples: Iterable[Sample]) -> Family:
    info = OWNER_METRICS[name]
    kind = CounterMetricFamily if info.kind == "counter" else GaugeMetricFamily
    family = kind(name, info.text, labels=info.labels)
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family
