"""The figures and curves of simulated traffic for the live view."""

from __future__ import annotations

from typing import Final

from worker.simulation.live import Frame, Speed, revenue_curves
from worker.simulation.traffic.generator import Traffic
from worker.simulation.traffic.summary import milliseconds

LINE_EVERY: Final = 10.0  # seconds between two lines in a pipe
LEAST_CURVE: Final = 30  # rows that a curve has room for at least


class TrafficView:
    """The source of the traffic's live view; `url` is the address of its web server."""

    def __init__(self, traffic: Traffic, url: str) -> None:
        self._traffic, self._url = traffic, url
        self._printed, self._speed = 0.0, Speed(looks=1)
        self._speed.at(0.0, 0)
        self._records, self._decisions = Speed(), Speed()

    @property
    def opening(self) -> tuple[str, ...]:
        """The address of the metrics."""
        return (f"metrics: {self._url}/metrics",)

    def line(self, seconds: float) -> str | None:
        """Return a line every few seconds."""
        if seconds - self._printed < LINE_EVERY:
            return None
        self._printed = seconds
        traffic, counts = self._traffic, self._traffic.counts
        rate = self._speed.at(seconds, counts.events)
        p50, p99 = (milliseconds(traffic.latencies.quantile(share)) for share in (0.5, 0.99))
        return (
            f"{seconds:4.0f} s  {counts.sessions:,} sessions, {counts.events:,} records ({rate:,.0f}/s), "
            f"{traffic.waiting:,} wait, decisions in {p50} (p99 {p99}), "
            f"lately {traffic.history.lately().share:.1%} of the oracle's revenue"
        )

    def frame(self, seconds: float) -> Frame:
        """Return the state of the traffic."""
        traffic, settings = self._traffic, self._traffic.settings
        pace = "flat out" if settings.rate is None else f"{settings.rate:g} users/s"
        state = "the last sessions end" if traffic.closing else f"{traffic.waiting:,} wait for a decision"
        rows = [row for row in traffic.history if row.sessions]
        return Frame(
            title=f"[bold]adcascade traffic[/]  {settings.environment} · {pace} · seed {settings.seed}",
            address=f"{self._url}/metrics",
            colour="magenta",
            done=done(traffic, seconds),
            status=f"{state}  [dim]in[/] {seconds:.0f} s",
            figures=self._figures(seconds),
            curves=revenue_curves(rows, max(LEAST_CURVE, len(rows))),
        )

    def _figures(self, seconds: float) -> list[tuple[str, str]]:
        counts, worth, latencies = self._traffic.counts, self._traffic.worth, self._traffic.latencies
        records = self._records.at(seconds, counts.events)
        decisions = self._decisions.at(seconds, counts.decisions)
        return [
            ("sessions", f"{counts.sessions:,}"),
            ("revenue earned", f"{counts.earned:,.1f}"),
            ("decision p50", milliseconds(latencies.quantile(0.5))),
            ("records", f"{counts.events:,} ({records:,.0f}/s)"),
            ("slates served", f"{worth.served:,.1f}"),
            ("decision p99", milliseconds(latencies.quantile(0.99))),
            ("decisions", f"{counts.decisions:,} ({decisions:,.0f}/s)"),
            ("oracle", f"{worth.oracle:,.1f}"),
            ("parameters", f"version {counts.version}" if counts.version >= 0 else "–"),
        ]


def done(traffic: Traffic, seconds: float) -> float | None:
    """Return the finished share of the traffic; None if it has no end."""
    settings = traffic.settings
    parts = []
    if settings.sessions:
        parts.append(traffic.counts.sessions / settings.sessions)
    if settings.duration:
        parts.append(1000 * seconds / settings.duration)
    return min(1.0, max(parts)) if parts else None
