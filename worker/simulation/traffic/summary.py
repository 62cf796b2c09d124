"""The numbers of simulated traffic, for the table at its end and for `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from worker import __version__
from worker.console import table
from worker.simulation.summary import worth_numbers, worth_rows
from worker.simulation.traffic.generator import Traffic


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
    counts, latencies = traffic.counts, traffic.latencies
    return {
        "sessions": counts.sessions,
        "decided": counts.decided,
        "undecided": counts.sessions - counts.decided,
        "forsaken": traffic.forsaken,
        "decisions": counts.decisions,
        "clicks": counts.clicks,
        "reward": counts.earned,
        **worth_numbers(*traffic.history.tenths(), traffic.worth),
        "latency": {
            "p50": latencies.quantile(0.5),
            "p99": latencies.quantile(0.99),
            "mean": latencies.mean,
            "longest": latencies.longest if latencies.count else None,
        },
        "records": {**counts.records, "total": counts.events, "per_second": counts.events / traffic.active_seconds},
        "other_decisions": counts.others,
        "modes": {mode: count for mode, count in counts.modes.items() if count},
        "parameters_version": counts.version if counts.version >= 0 else None,
        "skipped_seconds": counts.skipped / 1000,
        "finished": traffic.finished,
        "seconds": round(seconds, 3),
        "settings": asdict(traffic.settings),
        "version": __version__,
    }


def summary_table(numbers: Mapping[str, Any]) -> str:
    """Lay out a summary for people."""
    records, latency = numbers["records"], numbers["latency"]
    first = f"the first after {milliseconds(latency['p50'])}, p99 {milliseconds(latency['p99'])}"
    rows = [
        ["sessions", f"{numbers['sessions']:,}", f"{numbers['undecided']:,} without a decision"],
        ["records sent", f"{records['total']:,}", f"{records['per_second']:,.0f} per second"],
        ["decisions", f"{numbers['decisions']:,}", first],
        *worth_rows(numbers, earned="by clicks; some users never answer"),
    ]
    if numbers["forsaken"]:
        rows.insert(1, ["  forsaken", f"{numbers['forsaken']:,}", "got no further decision"])
    if numbers["skipped_seconds"]:
        skipped = f"{numbers['skipped_seconds']:.1f} s"
        rows.append(["skipped", skipped, "without users: this machine is too slow for the rate"])
    return table(["", "", ""], rows).lstrip("\n")


def milliseconds(seconds: float | None) -> str:
    """Lay out a duration for people."""
    return "–" if seconds is None else f"{1000 * seconds:.1f} ms"
