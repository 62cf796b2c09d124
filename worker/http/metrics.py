"""Metrics of the HTTP interface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sized
from typing import Final

from prometheus_client.core import Metric

from worker.http.problems import PROBLEMS
from worker.metrics import Histogram, MetricSpec
from worker.metrics.exposition import family
from worker.metrics.history import DURATION_BOUNDS

#: The routes by which requests are counted; `other` has everything that needs no key.
ROUTES: Final = ("arrive", "feedback", "session", "other")

STATUSES: Final = tuple(map(str, sorted({200, *(problem.status for problem in PROBLEMS.values())})))

REQUESTS: Final = MetricSpec(
    "adcascade_http_requests_total",
    "counter",
    "Requests answered, by route and status.",
    {"route": ROUTES, "status": STATUSES},
)
FALLBACKS: Final = MetricSpec(
    "adcascade_http_fallbacks_total", "counter", "Answers with fallback ads, because the deadline had come."
)
DURATIONS: Final = MetricSpec(
    "adcascade_http_request_duration_seconds", "histogram", "Time from a request's last header to its answer."
)
CONNECTIONS: Final = MetricSpec("adcascade_http_connections", "gauge", "Open connections.")
HTTP_CATALOGUE: Final = (REQUESTS, FALLBACKS, DURATIONS, CONNECTIONS)


class HttpMetrics:
    """Counts requests, and open connections; a collector for a registry of Prometheus."""

    def __init__(self, connections: Sized) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # route, status
        self.fallbacks = 0
        self.durations = Histogram(DURATION_BOUNDS)
        self._connections = connections

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self.requests[route, status] += 1
        self.durations.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """Return the series for Prometheus."""
        yield family(REQUESTS, {(route, str(status)): n for (route, status), n in sorted(self.requests.items())})
        yield family(FALLBACKS, {(): self.fallbacks})
        yield family(DURATIONS, {(): self.durations})
        yield family(CONNECTIONS, {(): len(self._connections)})
