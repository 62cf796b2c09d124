"""The value of slates under the true click model, which only a simulation knows, and how demo and traffic report it.

Values are expectations over everything that a user may do. They therefore measure the slates, without the luck of the
clicks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.ordering import by_worth
from worker.bandit.planning import values_of_slates
from worker.console import table
from worker.simulation.world import Environment

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
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
    """Values slates by the truth of a world; `rewards` (K + 1,) has the revenue of each arm, 0 for an unknown one.

    Values take into account that users leave, if they do.
    """

    def __init__(self, world: Environment, *, horizon: int, repeats: bool = True) -> None:
        self._world, self._known, self._horizon, self._repeats = world, len(world.rewards), horizon, repeats
        self.rewards = np.append(world.rewards, 0.0)

    def worth(self, contexts: Floats, slates: Ints) -> Worth:
        """Value slates (n, H) of arm indices for contexts (n, d); the index K stands for an unknown arm."""
        best, served = self.values(contexts, self.best_slates(contexts)), self.values(contexts, slates)
        return Worth(sessions=len(contexts), oracle=float(best.sum()), served=float(served.sum()))

    def values(self, contexts: Floats, slates: Ints) -> Floats:
        """Return the expected revenue of slates: (n, d), (n, H) → (n,)."""
        chances = sigmoid(self._world.log_odds_of(contexts, slates))
        return values_of_slates(chances, self.rewards[slates], self._world.staying(slates))[:, 0]

    def best_slates(self, contexts: Floats) -> Ints:
        """Return the best slates: (n, d) → (n, H)."""
        chances = sigmoid(self._world.log_odds(contexts)[:, : self._known])
        best = best_repeated if self._repeats else best_distinct
        return best(chances, self._world.rewards, self._world.stay, self._horizon)


def best_repeated(chances: Floats, rewards: Floats, stay: Floats, horizon: int) -> Ints:
    """Return the best slates with repeats, from click probabilities: (n, K) → (n, H).

    >>> best_repeated(np.array([[0.9, 0.25]]), np.array([1.0, 3.0]), np.ones(2), horizon=3)
    array([[1, 1, 0]])
    """
    slates, ahead = np.full((len(chances), horizon), NO_ARM), np.zeros((len(chances), 1))
    for position in reversed(range(horizon)):
        values = chances * rewards + (1 - chances) * stay * ahead
        slates[:, position], ahead = values.argmax(axis=1), values.max(axis=1, keepdims=True)
    return slates


def best_distinct(chances: Floats, rewards: Floats, stay: Floats, horizon: int) -> Ints:
    """Return the best slates without repeats, from click probabilities: (n, K) → (n, H).

    The dynamic programme of docs/math.md §7: a slate has its arms by falling worth, so each arm in that order is
    either shown next or left out.

    >>> best_distinct(np.array([[0.5, 0.1, 0.9]]), np.array([1.0, 2.0, 1.1]), np.ones(3), horizon=2)
    array([[1, 2]])
    """
    rows, order = np.arange(len(chances)), by_worth(chances.T, rewards, stay[None])
    # With 0 … H displays left, the best of the arms so far.
    values = np.zeros((horizon + 1, len(chances)))
    slates = np.full((horizon + 1, len(chances), horizon), NO_ARM)
    for arm in order[::-1]:
        f = chances[rows, arm]
        with_it = f * rewards[arm] + (1 - f) * stay[arm] * values[:-1]
        better = with_it > values[1:]
        values[1:] = np.where(better, with_it, values[1:])
        first = np.broadcast_to(arm[:, None], (horizon, len(arm), 1))
        slates[1:] = np.where(better[..., None], np.concatenate([first, slates[:-1, :, :-1]], axis=2), slates[1:])
    return np.asarray(slates[-1])


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────────────

#: A name, a value and an explanation.
TableRow = tuple[str, str, str]


def by_tenth(name: str, first: object, last: object, whole: object) -> dict[str, float]:
    """Return a figure of the first and of the last tenth of a run, and of the whole run."""
    return {"first_tenth": getattr(first, name), "last_tenth": getattr(last, name), "overall": getattr(whole, name)}


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
        "revenue_share": by_tenth("share", first, last, whole),
    }


def worth_rows(numbers: Mapping[str, Any], *, earned: str) -> list[TableRow]:
    """Return the rows of clicks, revenue and regret; `earned` explains the revenue earned."""
    regret, share = numbers["pseudo_regret"], numbers["revenue_share"]
    oracle = f"expected; {share['overall']:.1%} of the oracle's {numbers['oracle_reward']:,.1f}"
    tenths = f"pseudo-regret, last tenth; {regret['first_tenth']:.5f} in the first"
    return [
        ("clicks", f"{numbers['clicks']:,}", f"{numbers['clicks'] / max(1, numbers['sessions']):.1%} of the sessions"),
        ("revenue served", f"{numbers['served_reward']:,.1f}", oracle),
        ("  first tenth", f"{share['first_tenth']:.1%}", "of the oracle's"),
        ("  last tenth", f"{share['last_tenth']:.1%}", "of the oracle's"),
        ("revenue earned", f"{numbers['reward']:,.1f}", earned),
        ("regret/session", f"{regret['last_tenth']:.5f}", tenths),
    ]


def laid_out(rows: Sequence[TableRow]) -> str:
    """Lay out rows as a table for people."""
    return table(["", "", ""], rows).lstrip("\n")
