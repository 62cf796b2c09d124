"""Metrics of a gateway, in addition to those of the HTTP interface."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client.core import Metric

from worker.client.exchange import Exchange
from worker.gateway.model import PublishedModel
from worker.metrics import MetricSpec
from worker.metrics.exposition import family

RECORDS: Final = MetricSpec(
    "adcascade_gateway_records_total", "counter", "Records sent to Kafka.", {"topic": ("arrivals", "clicks")}
)
WAITS: Final = MetricSpec(
    "adcascade_gateway_waits_total",
    "counter",
    "Waits for a decision, by their end: it came, it did not come in time, or no slot was free for the request.",
    {"end": ("answered", "timed-out", "refused")},
)
LATE: Final = MetricSpec(
    "adcascade_gateway_late_decisions_total", "counter", "Decisions that came after the deadline of their request."
)
REPEATED: Final = MetricSpec(
    "adcascade_gateway_repeated_decisions_total", "counter", "Decisions that were known, or for an earlier position."
)
UNDELIVERED: Final = MetricSpec(
    "adcascade_gateway_undelivered_batches_total", "counter", "Records that no broker accepted in time."
)
REMEMBERED: Final = MetricSpec("adcascade_gateway_remembered_sessions", "gauge", "Sessions that are remembered.")
CONNECTED: Final = MetricSpec("adcascade_gateway_connected", "gauge", "1 while the brokers can be reached, else 0.")
VERSION: Final = MetricSpec(
    "adcascade_gateway_parameters_version", "gauge", "Newest version of the parameters, -1 before the first."
)
GATEWAY_CATALOGUE: Final = (RECORDS, WAITS, LATE, REPEATED, UNDELIVERED, REMEMBERED, CONNECTED, VERSION)


class GatewayMetrics:
    """Makes the series at every scrape."""

    def __init__(self, exchange: Exchange, model: PublishedModel) -> None:
        self._exchange, self._model = exchange, model

    def collect(self) -> Iterable[Metric]:
        """Return the series for Prometheus."""
        exchange, counts = self._exchange, self._exchange.counts
        yield family(RECORDS, {("arrivals",): counts.arrivals, ("clicks",): counts.feedback})
        yield family(
            WAITS,
            {("answered",): counts.answered, ("timed-out",): counts.timed_out, ("refused",): counts.refused},
        )
        yield family(LATE, {(): counts.late})
        yield family(REPEATED, {(): counts.repeated})
        yield family(UNDELIVERED, {(): counts.undelivered})
        yield family(REMEMBERED, {(): len(exchange)})
        yield family(CONNECTED, {(): exchange.transport.trouble is None})
        yield family(VERSION, {(): self._model.version})
