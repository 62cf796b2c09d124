"""Metrics of the HTTP interface."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sized
from typing import Final

from worker.http.problems import PROBLEMS
from worker.metrics.exposition import counter, gauge, histogram
from worker.metrics.history import DURATION_BOUNDS, Histogram

#: The routes by which requests are counted; `other` has everything that needs no key.
ROUTES: Final = ("arrive", "feedback", "session", "other")

STATUSES: Final = tuple(map(str, sorted({200, *(problem.status for problem in PROBLEMS.values())})))

HTTP_CATALOGUE: Final = (
    counter(
        "adcascade_http_requests_total",
        "Requests answered, by route and status.",
        "requests",
        route=ROUTES,
        status=STATUSES,
    ),
    counter("adcascade_http_fallbacks_total", "Answers with fallback ads, because the deadline had come.", "fallbacks"),
    histogram(
        "adcascade_http_request_duration_seconds", "Time from a request's last header to its answer.", "durations"
    ),
    gauge("adcascade_http_connections", "Open connections.", lambda metrics: len(metrics.connections)),
)


class HttpMetrics:
    """Counts requests, and open connections."""

    def __init__(self, connections: Sized) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # route, status
        self.fallbacks = 0
        self.durations = Histogram(DURATION_BOUNDS)
        self.connections = connections

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self.requests[route, status] += 1
        self.durations.observe(seconds)
