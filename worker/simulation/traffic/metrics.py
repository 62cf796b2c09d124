"""The Prometheus metrics of simulated traffic.

The figures that need the truth have the names of `worker.metrics`; they and the traffic's own never collide with those
that a worker exports, because a sum over all targets would count them twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from worker.metrics import CATALOGUE
from worker.simulation.traffic.generator import Traffic

_HELP: Final = {spec.name: spec.help for spec in CATALOGUE}


class TrafficMetrics:
    """Makes the series of `registry` at every scrape."""

    def __init__(self, traffic: Traffic) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._traffic = traffic
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Make the series."""
        traffic, counts, worth = self._traffic, self._traffic.counts, self._traffic.worth
        lately = traffic.history.lately()
        known = {
            "adcascade_pseudo_regret_total": max(0.0, worth.regret),
            "adcascade_oracle_reward_total": worth.oracle,
            "adcascade_served_value_total": worth.served,
        }
        for name, value in known.items():
            yield CounterMetricFamily(name, _HELP[name], value)
        yield GaugeMetricFamily(
            "adcascade_pseudo_regret_per_session",
            "Simulated traffic only. Pseudo-regret of the last seconds, divided by their sessions.",
            lately.regret_per_session,
        )
        for name, text, value in (
            ("reward", "Revenue of the clicks that were sent.", counts.earned),
            ("sessions", "Sessions whose arrival was sent.", counts.sessions),
            ("decided", "Sessions that got a decision.", counts.decided),
            ("undecided", "Sessions that got no decision in time.", counts.undecided),
            ("decisions", "Decisions that a user waited for.", counts.decisions),
            ("clicks", "Clicks sent, second copies not counted.", counts.clicks),
        ):
            yield CounterMetricFamily(f"adcascade_traffic_{name}_total", text, value)
        waiting = "adcascade_traffic_waiting_sessions"
        yield GaugeMetricFamily(waiting, "Sessions that wait for a decision.", traffic.waiting)
        records = CounterMetricFamily(
            "adcascade_traffic_records_total", "Records sent, second copies and poison included.", labels=["topic"]
        )
        for topic, count in counts.records.items():
            records.add_metric([topic], count)
        yield records
        yield HistogramMetricFamily(
            "adcascade_traffic_decision_seconds",
            "Time from sending an arrival to receiving its first decision.",
            traffic.delays.buckets(),
            traffic.delays.sum,
        )
