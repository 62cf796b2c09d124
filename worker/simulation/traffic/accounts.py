"""The accounts of simulated traffic: how long decisions took, and what the slates served were worth.

Everything here takes the same memory however long the traffic runs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from worker.bandit.planning import Planner
from worker.bandit.precision import Floats, Ints
from worker.bandit.regret import best_revenue, slate_revenue
from worker.simulation.environments import Environment

_STEP: Final = math.log(1.02)
_SHORTEST: Final = 1e-6

#: Rows of a history before each two of them are put together.
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
        """Take note of a duration."""
        self.count += 1
        self.sum += seconds
        self.longest = max(self.longest, seconds)
        self._counts[math.floor(math.log(max(seconds, _SHORTEST)) / _STEP)] += 1

    def quantile(self, share: float) -> float | None:
        """Return the duration that this share of all does not exceed; None if there is none."""
        wanted, passed = share * self.count, 0
        for step in sorted(self._counts):
            passed += self._counts[step]
            if passed >= wanted:
                return min(self.longest, math.exp((step + 0.5) * _STEP))
        return None

    @property
    def mean(self) -> float | None:
        """The mean duration; None if there is none."""
        return self.sum / self.count if self.count else None


@dataclass(slots=True, kw_only=True)
class Worth:
    """What some sessions were worth under the true model, in expectation: the best slates, and those served."""

    sessions: int = 0
    oracle: float = 0.0
    served: float = 0.0

    def add(self, other: Worth) -> None:
        """Add other sessions to these."""
        self.sessions += other.sessions
        self.oracle += other.oracle
        self.served += other.served

    @property
    def regret(self) -> float:
        """The pseudo-regret V^{π*} − V^{π}; never below 0 but for rounding."""
        return self.oracle - self.served

    @property
    def regret_per_session(self) -> float:
        """The pseudo-regret of a session, on average; 0 without sessions."""
        return self.regret / self.sessions if self.sessions else 0.0

    @property
    def share(self) -> float:
        """What the slates served were worth, as a share of the best ones; 1 where there is nothing to compare with."""
        return self.served / self.oracle if self.oracle else 1.0


def together(parts: Sequence[Worth]) -> Worth:
    """Add up."""
    whole = Worth()
    for part in parts:
        whole.add(part)
    return whole


class History:
    """Worth by time, in rows of equal length that double when they are too many.

    Parameters
    ----------
    row : milliseconds of the first rows

    Examples
    --------
    >>> history = History(row=1000, most=2)
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
        """Add sessions of a time, in milliseconds since the beginning."""
        self.whole.add(worth)
        while time // self.row >= self._most:
            self._rows = [together(self._rows[place : place + 2]) for place in range(0, len(self._rows), 2)]
            self.row *= 2
        while time // self.row >= len(self._rows):
            self._rows.append(Worth())
        self._rows[time // self.row].add(worth)

    def tenths(self) -> tuple[Worth, Worth]:
        """Return the first and the last tenth of the time in which there were sessions, at least a row each."""
        rows = [row for row in self._rows if row.sessions]
        count = max(1, len(rows) // 10)
        return together(rows[:count]), together(rows[-count:])

    def lately(self, rows: int = 10) -> Worth:
        """Return the last rows."""
        return together(self._rows[-rows:])


class Valuer:
    """Knows the truth, and so what slates are worth.

    Parameters
    ----------
    world : the truth
    horizon : the longest slate H
    repeats : whether a slate may show an arm twice, for the oracle as for everyone
    """

    def __init__(self, world: Environment, *, horizon: int, repeats: bool) -> None:
        self._world = world
        self._planner = Planner(world.truth, world.rewards, horizon=horizon, repeats=repeats, dtype=np.float64)
        # The last place stands for an arm that the world does not know: nobody clicks it.
        self._biases = np.append(world.truth.theta_arms, -np.inf)
        self._rewards = np.append(world.rewards, 0.0)

    def worth(self, contexts: Floats, slates: Ints) -> Worth:
        """Value slates (n, H) of arms as places, for contexts (n, d); an unknown arm is at place K."""
        truth = self._world.truth
        best = best_revenue(self._planner, truth.probabilities(contexts))
        served = slate_revenue(truth.theta_context, self._biases, self._rewards, contexts, slates)
        return Worth(sessions=len(contexts), oracle=float(best.sum()), served=float(served.sum()))
