"""Histograms: counts by upper bound, and quantiles of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

#: Upper bounds in seconds of the time to handle a batch, in records of its size, in seconds from arrival to decision.
DURATION_BOUNDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
SIZE_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
DELAY_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Histogram:
    """Count observations by upper bound; unlike the Prometheus client's, it takes many equal ones in one call."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that was observed `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Return the counts at or below each bound."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """Return the bound at or below which a share of the observations lies; None without any, or beyond the last bound.

    >>> quantile((0.1, 1.0), (98, 2, 0), 0.5), quantile((0.1, 1.0), (98, 2, 0), 0.99)
    (0.1, 1.0)
    """
    wanted, seen = share * sum(counts), 0
    for bound, count in zip(bounds, counts, strict=False):
        seen += count
        if seen and seen >= wanted:
            return float(bound)
    return None
