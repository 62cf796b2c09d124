"""The value of slates under the true click model, which only a simulation knows.

Values are expectations over everything that a user may do. They therefore measure the slates, without the luck of the
clicks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from worker.bandit.arrays import Floats, Ints, sigmoid
from worker.bandit.planning import Planner
from worker.bandit.regret import best_revenue, slate_revenue
from worker.simulation.environments import Environment

T = TypeVar("T")


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """The expected revenue of some sessions: `oracle` with the best slates, `served` with the slates they got."""

    sessions: int = 0
    oracle: float = 0.0
    served: float = 0.0

    def __add__(self, other: Worth) -> Worth:
        return Worth(
            sessions=self.sessions + other.sessions,
            oracle=self.oracle + other.oracle,
            served=self.served + other.served,
        )

    @property
    def regret(self) -> float:
        """The pseudo-regret V^{π*} − V^{π}; never below 0 but for rounding."""
        return self.oracle - self.served

    @property
    def regret_per_session(self) -> float:
        """The mean pseudo-regret of a session; 0 without sessions."""
        return self.regret / self.sessions if self.sessions else 0.0

    @property
    def share(self) -> float:
        """The share of the oracle's revenue that was served; 1 if the oracle's is 0."""
        return self.served / self.oracle if self.oracle else 1.0


def together(parts: Iterable[Worth]) -> Worth:
    """Add up."""
    return sum(parts, Worth())


def tenths(rows: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return the first and the last tenth of some rows, each at least one row if there is any.

    >>> tenths(range(25))
    (range(0, 2), range(23, 25))
    """
    count = max(1, len(rows) // 10)
    return rows[:count], rows[-count:]


class Valuer:
    """Values slates by the truth of a world; `rewards` (K + 1,) has the revenue of each arm, 0 for an unknown one."""

    def __init__(self, world: Environment, *, horizon: int, repeats: bool = True) -> None:
        self._truth = world.truth
        self._planner = Planner(world.truth, world.rewards, horizon=horizon, repeats=repeats, dtype=np.float64)
        self.rewards = np.append(world.rewards, 0.0)

    def worth(self, contexts: Floats, slates: Ints) -> Worth:
        """Value slates (n, H) of arm indices for contexts (n, d); the index K stands for an unknown arm."""
        best = best_revenue(self._planner, sigmoid(self._truth.log_odds(contexts)))
        served = slate_revenue(self._truth, self.rewards, contexts, slates)
        return Worth(sessions=len(contexts), oracle=float(best.sum()), served=float(served.sum()))
