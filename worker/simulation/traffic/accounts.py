"""The accounts of simulated traffic: the latency of decisions, and the worth of the slates over time.

Memory is bounded, however long the traffic runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from worker.simulation.worth import Worth, tenths, together

_STEP: Final = math.log(1.02)
_SHORTEST: Final = 1e-6

#: The most rows of a history; then each two of them are merged.
MOST_ROWS: Final = 2_000


class Latencies:
    """Quantiles of any number of durations in seconds, each within one per cent.

    >>> latencies = Latencies()
    >>> for milliseconds in range(1, 101):
    ...     latencies.add(milliseconds / 1000)
    >>> f"{latencies.quantile(0.5):.3f} {latencies.quantile(0.99):.2f} {latencies.longest:.1f}"
    '0.050 0.10 0.1'
    """

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0.0
        self.longest = 0.0
        self._counts: Counter[int] = Counter()

    def add(self, seconds: float) -> None:
        """Count a duration."""
        self.count += 1
        self.sum += seconds
        self.longest = max(self.longest, seconds)
        self._counts[math.floor(math.log(max(seconds, _SHORTEST)) / _STEP)] += 1

    def quantile(self, share: float) -> float | None:
        """Return the quantile of a share; None without durations."""
        wanted, passed = share * self.count, 0
        for step in sorted(self._counts):
            passed += self._counts[step]
            if passed >= wanted:
                return min(self.longest, math.exp((step + 0.5) * _STEP))
        return None

    @property
    def mean(self) -> float | None:
        """The mean duration; None without durations."""
        return self.sum / self.count if self.count else None


class WorthHistory:
    """Worth by time, in rows of `row` milliseconds, which doubles when there are more than `most` rows.

    >>> history = WorthHistory(row=1000, most=2)
    >>> for time in (0, 1500, 4000):
    ...     history.add(time, Worth(sessions=1, oracle=1.0, served=0.5))
    >>> history.row, [worth.sessions for worth in history]
    (4000, [2, 1])
    """

    def __init__(self, *, row: int = 1_000, most: int = MOST_ROWS) -> None:
        self.row = row
        self.whole = Worth()
        self._most = most
        self._rows: list[Worth] = []

    def __iter__(self) -> Iterator[Worth]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, time: int, worth: Worth) -> None:
        """Add sessions at a time in milliseconds since the start."""
        self.whole += worth
        while time // self.row >= self._most:
            self._rows = [together(self._rows[i : i + 2]) for i in range(0, len(self._rows), 2)]
            self.row *= 2
        while time // self.row >= len(self._rows):
            self._rows.append(Worth())
        self._rows[time // self.row] += worth

    def tenths(self) -> tuple[Worth, Worth]:
        """Return the first and the last tenth of the rows with sessions, at least a row each."""
        first, last = tenths([row for row in self._rows if row.sessions])
        return together(first), together(last)

    def lately(self, rows: int = 10) -> Worth:
        """Return the sum of the last rows."""
        return together(self._rows[-rows:])
