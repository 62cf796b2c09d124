"""Recent history for the status page, of bounded size: closed windows, marks of the counts, contexts of users.

A mark holds all counts at one time; "lately" is the difference between now and the oldest mark. Time is event time, so
a simulated run of a few seconds shows the hours it stands for. Prometheus keeps the long history.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from worker.bandit.arrays import Floats
from worker.bandit.policies import POLICIES
from worker.metrics.troubles import ActiveTrouble
from worker.stream.events import Episode
from worker.stream.parameters import Parameters
from worker.stream.topology import Tally

MOST_WINDOWS: Final = 240
MOST_MARKS: Final = 16
BETWEEN_MARKS: Final = 60_000  # milliseconds of event time
#: Contexts of recent users, of one per batch, that the figures of the arms are averaged over.
MOST_CONTEXTS: Final = 64
#: Upper bounds in seconds of the time to handle a batch, in records of its size, in seconds from arrival to decision.
DURATION_BOUNDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
SIZE_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000)
#: The way of a record through a worker on Kafka: to be fetched, to be handled, handling, to be acknowledged.
STAGES: Final = ("fetch", "queue", "handle", "write")
DELAY_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


# ── histograms ────────────────────────────────────────────────────────────────────────────────────────────────────────


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
        bounds = (*map(str, map(float, self.bounds)), "+Inf")
        return [(bound, float(total)) for bound, total in zip(bounds, accumulate(self.counts), strict=True)]

    def quantile(self, share: float, before: Histogram | None = None) -> float | None:
        """Return the bound at or below which a share of the observations lies; None beyond the last bound.

        With an earlier state of the same histogram, only later observations count, if there are any.

        >>> histogram = Histogram((0.1, 1.0))
        >>> histogram.observe(0.05, times=98), histogram.observe(0.5, times=2)
        (None, None)
        >>> histogram.quantile(0.98), histogram.quantile(0.99), histogram.quantile(1.0, Histogram((0.1, 1.0)))
        (0.1, 1.0, 1.0)
        """
        later = [now - then for now, then in zip(self.counts, before.counts, strict=True)] if before else []
        counts = later if any(later) else self.counts
        wanted = share * sum(counts)
        sums = zip(self.bounds, accumulate(counts), strict=False)
        return next((float(bound) for bound, seen in sums if seen and seen >= wanted), None)


# ── windows and marks ─────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A closed window; the true values of the best and the served slates are known in simulated traffic only."""

    episode: Episode
    oracle: float | None = None
    served: float | None = None


@dataclass(slots=True, kw_only=True)
class Mark:
    """All counts since the process started, at one event time.

    `histograms` are by name, without the prefix `adcascade_`, and then by the values of the labels.
    """

    time: int
    tally: Tally
    histograms: Mapping[str, Mapping[tuple[str, ...], Histogram]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An immutable copy of everything that `Metrics` holds.

    `since` is the oldest mark, where "lately" begins; None just after the start. `contexts` are packed contexts of
    recent users, as the version takes them. `forgotten` is the time of the last version that forgot something, the
    share of older sessions that it kept, and the ads that began anew. `numbers` are sums over windows and versions.
    `clicks` are predicted and observed clicks of closed windows, by sessions.
    """

    now: Mark
    since: Mark | None
    windows: Sequence[Window]
    contexts: Sequence[bytes]
    parameters: Parameters | None
    forgotten: tuple[int, float, tuple[str, ...]] | None
    numbers: Mapping[str, float]
    clicks: Floats
    imbalance: Mapping[str, float]
    lag: Mapping[str, float]
    horizon: int
    troubles: Sequence[ActiveTrouble]


def exploration_share(parameters: Parameters) -> float | None:
    """Return the share of sessions that a version allows to explore; None if its policy has no budget."""
    if not POLICIES[parameters.settings.policy].is_selective:
        return None
    if parameters.folds < parameters.settings.warmup or not parameters.expected_sessions:
        return 0.0  # warm-up does not count as exploration
    return min(1.0, parameters.explore_budget / parameters.expected_sessions)
