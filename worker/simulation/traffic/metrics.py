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

    def describe(self) -> Iterable[Metric]:
        """Return nothing: the names are fixed."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Make the series."""
        traffic, counts, worth = self._traffic, self._traffic.counts, self._traffic.worth
        lately = traffic.history.lately()
        for name, value in (
            ("adcascade_pseudo_regret", max(0.0, worth.regret)),
            ("adcascade_oracle_reward", worth.oracle),
            ("adcascade_served_value", worth.served),
        ):
            yield _counter(f"{name}_total", _HELP[f"{name}_total"], value)
        yield _gauge(
            "adcascade_pseudo_regret_per_session",
            "Simulated traffic only. Pseudo-regret of the last seconds, divided by their sessions.",
            lately.regret_per_session,
        )
        yield _counter("adcascade_traffic_reward_total", "Revenue of the clicks that were sent.", counts.earned)
        yield _counter("adcascade_traffic_sessions_total", "Sessions whose arrival was sent.", counts.sessions)
        yield _counter("adcascade_traffic_decided_total", "Sessions that got a decision.", counts.decided)
        yield _counter("adcascade_traffic_undecided_total", "Sessions that got no decision in time.", counts.undecided)
        yield _counter("adcascade_traffic_decisions_total", "Decisions that a user waited for.", counts.decisions)
        yield _counter("adcascade_traffic_clicks_total", "Clicks sent, second copies not counted.", counts.clicks)
        yield _gauge("adcascade_traffic_waiting_sessions", "Sessions that wait for a decision.", traffic.waiting)
        records = CounterMetricFamily(
            "adcascade_traffic_records_total", "Records sent, second copies and poison included.", labels=["topic"]
        )
        for topic, count in counts.records.items():
            records.add_metric([topic], count)
        yield records
        delays = HistogramMetricFamily(
            "adcascade_traffic_decision_seconds", "Time from sending an arrival to receiving its first decision."
        )
        delays.add_metric([], traffic.delays.buckets(), traffic.delays.sum)
        yield delays


def _counter(name: str, text: str, value: float) -> Metric:
    family = CounterMetricFamily(name, text)
    family.add_metric([], value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(name, text)
    family.add_metric([], value)
    return family
