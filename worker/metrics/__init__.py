"""Metrics of a worker: the catalogue, the observer that sums them, and the recent history for the status page.

`Metrics` observes what the runners emit. Prometheus and the status page both read its `snapshot`, never its state.
No HTTP here, and nothing that changes a decision.
"""

from __future__ import annotations

from worker.metrics.catalogue import CATALOGUE, CONSUMED, IDENTITIES
from worker.metrics.exposition import MetricSpec
from worker.metrics.history import Histogram, Snapshot, Window
from worker.metrics.observer import Metrics

__all__ = [
    "CATALOGUE",
    "CONSUMED",
    "IDENTITIES",
    "Histogram",
    "MetricSpec",
    "Metrics",
    "Snapshot",
    "Window",
]
