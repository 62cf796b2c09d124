"""The value of slates under the true click model, which only a simulation knows.

Values are expectations over everything that a user may do. They therefore measure the slates, without the luck of the
clicks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from worker.bandit.answers import AnswerRates
from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.ordering import best_values
from worker.bandit.planning import optimal_values, values_of_slates
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


def best_distinct(chances: Floats, rewards: Floats, rates: AnswerRates) -> Ints:
    """Return the best slates without repeats: (n, K) → (n, H).

    The dynamic programme of docs/math.md §7: a slate takes its arms by falling worth, so each arm in that order is
    either shown next or left out.

    >>> everybody = AnswerRates.everybody(arms=3, horizon=2)
    >>> best_distinct(np.array([[0.5, 0.1, 0.9]]), np.array([1.0, 2.0, 1.1]), everybody)
    array([[1, 2]])
    """
    kept = rates.arms * (1 - chances)
    worth = rates.arms * chances * rewards / np.maximum(1 - kept, np.finfo(np.float64).tiny)
    order = np.argsort(-worth, axis=1, kind="stable")
    rows, left = np.arange(len(chances)), rates.positions[::-1, None]  # with 1 … H displays left
    values = np.zeros((len(left) + 1, len(chances)))
    shown = []
    for arm in order.T[::-1]:
        f = chances[rows, arm]
        with_it = np.minimum(1.0, left * rates.arms[arm]) * (f * rewards[arm] + (1 - f) * values[:-1])
        shown.append(with_it > values[1:])
        values[1:] = np.maximum(values[1:], with_it)
    slates = np.full((len(chances), len(left)), NO_ARM)
    places = np.zeros(len(chances), dtype=np.intp)
    for arm, wanted in zip(order.T, reversed(shown), strict=True):
        next_rows = rows[places < len(left)]
        next_rows = next_rows[wanted[len(left) - 1 - places[next_rows], next_rows]]
        slates[next_rows, places[next_rows]] = arm[next_rows]
        places[next_rows] += 1
    return slates


class Valuer:
    """Values slates by the truth of a world; `rewards` (K + 1,) has the revenue of each arm, 0 for an unknown one.

    Both values take into account that users leave, if they do.
    """

    def __init__(self, world: Environment, *, horizon: int, repeats: bool = True) -> None:
        self._truth, self._known, self._horizon, self._repeats = world.truth, len(world.rewards), horizon, repeats
        self._rates = world.answer_rates(horizon)
        self.rewards = np.append(world.rewards, 0.0)

    def worth(self, contexts: Floats, slates: Ints) -> Worth:
        """Value slates (n, H) of arm indices for contexts (n, d); the index K stands for an unknown arm."""
        best, served = self.best(contexts), self.served(contexts, slates)
        return Worth(sessions=len(contexts), oracle=float(best.sum()), served=float(served.sum()))

    def best(self, contexts: Floats) -> Floats:
        """Return the expected revenue of the best slates: (n, d) → (n,)."""
        chances = sigmoid(self._truth.log_odds(contexts)[:, : self._known])
        rewards = self.rewards[:-1]
        if not self._repeats:
            return best_values(chances, rewards, self._horizon, self._rates)
        rates = None if self._rates is None else self._rates.of_arms(np.arange(self._known))
        return optimal_values(chances, rewards, self._horizon, rates)[:, 0]

    def best_slates(self, contexts: Floats) -> Ints:
        """Return the best slates: (n, d) → (n, H)."""
        chances = sigmoid(self._truth.log_odds(contexts)[:, : self._known])
        rewards = self.rewards[:-1]
        rates = self._rates or AnswerRates.everybody(arms=self._known, horizon=self._horizon)
        if not self._repeats:
            return best_distinct(chances, rewards, rates)
        by_position = rates.of_arms(np.arange(self._known))
        ahead = np.column_stack([optimal_values(chances, rewards, self._horizon, by_position), np.zeros(len(chances))])
        return np.column_stack(
            [
                (by_position[h] * (ahead[:, h + 1 : h + 2] * (1 - chances) + chances * rewards)).argmax(axis=1)
                for h in range(self._horizon)
            ]
        )

    def served(self, contexts: Floats, slates: Ints) -> Floats:
        """Return the expected revenue of slates: (n, d), (n, H) → (n,)."""
        chances = sigmoid(self._truth.log_odds_of(contexts, slates))
        rates = None if self._rates is None else self._rates.of_slates(slates)
        return values_of_slates(chances, self.rewards[slates], rates)[:, 0]


# ── summaries of demo and traffic ────────────────────────────────────────────────────────────────────────────────────


def worth_numbers(first: Worth, last: Worth, whole: Worth) -> dict[str, Any]:
    """Return expected revenue, pseudo-regret and share of the oracle, in the tenths and overall."""
    return {
        "oracle_reward": whole.oracle,
        "served_reward": whole.served,
        "pseudo_regret": {
            "first_tenth": first.regret_per_session,
            "last_tenth": last.regret_per_session,
            "per_session": whole.regret_per_session,
            "total": whole.regret,
        },
        "revenue_share": {"first_tenth": first.share, "last_tenth": last.share, "overall": whole.share},
    }


def worth_rows(numbers: Mapping[str, Any], *, earned: str) -> list[list[str]]:
    """Return the rows of clicks, revenue and regret; `earned` explains the revenue earned."""
    regret, share = numbers["pseudo_regret"], numbers["revenue_share"]
    oracle = f"expected; {share['overall']:.1%} of the oracle's {numbers['oracle_reward']:,.1f}"
    tenths = f"pseudo-regret in the last tenth; {regret['first_tenth']:.5f} in the first"
    return [
        ["clicks", f"{numbers['clicks']:,}", f"{numbers['clicks'] / max(1, numbers['sessions']):.1%} of the sessions"],
        ["revenue served", f"{numbers['served_reward']:,.1f}", oracle],
        ["  first tenth", f"{share['first_tenth']:.1%}", "of the oracle's"],
        ["  last tenth", f"{share['last_tenth']:.1%}", "of the oracle's"],
        ["revenue earned", f"{numbers['reward']:,.1f}", earned],
        ["regret/session", f"{regret['last_tenth']:.5f}", tenths],
    ]
