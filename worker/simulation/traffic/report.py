"""What simulated traffic shows of itself: lines of progress, the table at its end, `--json`, and Prometheus metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from prometheus_client import CollectorRegistry

from worker import __version__
from worker.console import note
from worker.metrics.catalogue import CATALOGUE
from worker.metrics.exposition import Series
from worker.simulation.traffic.generator import Traffic
from worker.simulation.worth import TableRow, tenths, together, worth_numbers, worth_rows

LINE_EVERY: Final = 10.0  # seconds between two lines
RECENT: Final = 10  # seconds that "lately" stands for


def summary(traffic: Traffic, seconds: float) -> dict[str, Any]:
    """Return the numbers of a run.

    reward : revenue of the clicks
    oracle_reward, served_reward : expected revenue of the best slates and of those served, for sessions whose whole
        slate was received
    pseudo_regret : their difference per session in the first and the last tenth of the time and overall; `total` is
        the sum
    undecided, forsaken : sessions without a first or without a further decision
    latency : from sending an arrival to receiving its first decision, in seconds
    """
    counts, decided = traffic.counts, traffic.counts.decided
    first, last = tenths([worth for worth in traffic.seconds if worth.sessions])
    return {
        "sessions": counts.sessions,
        "decided": counts.decided,
        "undecided": counts.sessions - counts.decided,
        "forsaken": traffic.forsaken,
        "decisions": counts.decisions,
        "clicks": counts.clicks,
        "reward": counts.earned,
        **worth_numbers(together(first), together(last), traffic.worth),
        "latency": {
            "p50": traffic.latency(0.5),
            "p99": traffic.latency(0.99),
            "mean": traffic.latencies.sum / decided if decided else None,
            "longest": traffic.longest if decided else None,
        },
        "records": {**counts.records, "total": counts.events, "per_second": counts.events / traffic.active_seconds},
        "other_decisions": counts.others,
        "parameters_version": counts.version if counts.version >= 0 else None,
        "finished": traffic.finished,
        "seconds": round(seconds, 3),
        "settings": asdict(traffic.settings),
        "version": __version__,
    }


def summary_rows(numbers: Mapping[str, Any]) -> list[TableRow]:
    """Return the rows of a summary."""
    records, latency, version = numbers["records"], numbers["latency"], numbers["parameters_version"]
    first = f"the first after {milliseconds(latency['p50'])}, p99 {milliseconds(latency['p99'])}"
    rows = [
        ("sessions", f"{numbers['sessions']:,}", f"{numbers['undecided']:,} without a decision"),
        ("records sent", f"{records['total']:,}", f"{records['per_second']:,.0f} per second"),
        ("decisions", f"{numbers['decisions']:,}", first),
        *worth_rows(numbers, earned="by clicks; some users never answer"),
        ("parameters", "–" if version is None else f"v{version}", "the newest in a decision"),
    ]
    if numbers["forsaken"]:
        rows.insert(1, ("  forsaken", f"{numbers['forsaken']:,}", "got no further decision"))
    return rows


def milliseconds(seconds: float | None) -> str:
    """Lay out a duration for people."""
    return "–" if seconds is None else f"{1000 * seconds:.1f} ms"


class TrafficLines:
    """Prints a line about the traffic every few seconds."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._printed, self._events = 0.0, 0  # time and records of the last line

    def show(self, seconds: float) -> None:
        """Print a line if it is time for one, `seconds` after the start."""
        if seconds - self._printed < LINE_EVERY:
            return
        traffic, counts = self._traffic, self._traffic.counts
        rate = (counts.events - self._events) / (seconds - self._printed)
        self._printed, self._events = seconds, counts.events
        p50, p99 = (milliseconds(traffic.latency(share)) for share in (0.5, 0.99))
        note(
            f"{seconds:4.0f} s  {counts.sessions:,} sessions, {counts.events:,} records ({rate:,.0f}/s), "
            f"{traffic.waiting:,} wait, decisions in {p50} (p99 {p99}), "
            f"lately {together(traffic.seconds[-RECENT:]).share:.1%} of the oracle's revenue"
        )


# ── metrics ──────────────────────────────────────────────────────────────────────────────────────────────────────────


_READ: Final = {
    "adcascade_pseudo_regret_total": lambda traffic: max(0.0, traffic.worth.regret),
    "adcascade_oracle_reward_total": lambda traffic: traffic.worth.oracle,
}


def traffic_registry(traffic: Traffic) -> CollectorRegistry:
    """Return the metrics of traffic: the figures that need the truth, which no worker knows."""
    registry, specs = CollectorRegistry(), [spec for spec in CATALOGUE if spec.name in _READ]
    registry.register(Series([spec._replace(read=_READ[spec.name]) for spec in specs], lambda: traffic))
    return registry
