"""The contest of the arms for the positions of a slate, in float64.

Arm k at position h is clicked with probability f = f_kh. Of the users who do not click, the share s = min(1, ρ_k r_h)
goes on, 1 where rates are not learned (docs/math.md §8). With repeats, all eligible arms compete at every position:

    score = q + bonus        q = Q̂_h(k) = f e + (1 − f) s V_{h+1}

The bonus is 0 if the position exploits. Each session multiplies the bonus of each arm by a factor of its own, by its
id: the spread. Without an id, factors are 1. `myopic-ucb` takes every position as the first and the last one, V_{h+1} =
0, and has no spread.

Without repeats (docs/math.md §7) arms are shown in an order, by falling reward or, where positions differ or users
leave, by f e / (1 − s (1 − f)), so only those after the last one shown compete. With m displays left, arm k earns
f_k e_k + (1 − f_k) s V(k+1, m−1): q under the estimate, score under the optimistic probabilities of the bonus if the
session explores. The bonus is the difference. A slate that ends too early is filled up with other arms, which compete
for the rest by the revenue of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np

from worker.bandit.arrays import Floats, Ints, sigmoid
from worker.bandit.bonuses import Spread, bonus_named
from worker.bandit.ordering import by_worth
from worker.bandit.planning import Planner, optimal_values
from worker.bandit.policies import MyopicUcb, policy_named
from worker.errors import InputError
from worker.stream.chance import stable_keys
from worker.stream.parameters import Parameters
from worker.stream.tastes import Contribution, position_effect, strongest_first

SCORES: Final = "scores"
GREEDY: Final = "greedy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An arm that competed for a position.

    probability : of a click at this position
    answer_rate : share of the users without a click who go on; None where rates are not learned
    spread : factor of the session on the bonus; None without a session, or if the policy has no spread
    contributions : the parts of its log-odds, the largest first
    """

    arm: str
    probability: float
    q: float
    width: float
    bonus: float
    score: float
    answer_rate: float | None = None
    spread: float | None = None
    contributions: tuple[Contribution, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position of the slate: the competing arms, the choice, and the revenue of a user who goes on (continuation).

    way : how it was chosen: by the highest score, or by something else (`way_of`)
    out : why each of the other arms could not be shown here
    """

    position: int
    continuation: float
    choice: str | None
    mode: str
    arms: tuple[Candidate, ...]
    way: str = SCORES
    out: Mapping[str, str] = field(default_factory=dict)


#: A round of the contest: columns that compete, revenue after the position, the position (from 0) whose probabilities
#: and rates count, q and score of all columns.
_Round: TypeAlias = tuple[Ints, float, int, Floats, Floats]


class Contest:
    """The eligible arms of one session, one column each, in float64; in the order of showing if arms may not repeat.

    `first` (columns,) are the click probabilities at the first position, `chances` (H, columns) those at each, `rates`
    (H, columns) the shares of the users without a click who go on, `factors` (H, columns) those of the spread.
    """

    def __init__(
        self,
        parameters: Parameters,
        planner: Planner,
        context: Floats,
        eligible: Ints,
        session: str | None,
        *,
        explores: bool,
    ) -> None:
        self.parameters, self.settings = parameters, parameters.settings
        self.policy = policy_named(self.settings.policy)
        if not self.settings.repeats:
            eligible = _in_order(parameters, planner, context, eligible, session, explores=explores)
        self.arms, self.rewards = eligible, parameters.rewards[eligible]
        contexts, arms = context[None, :], eligible[None, :]
        self.log_odds = parameters.model.log_odds_of(contexts, arms)[0]
        self.widths = np.sqrt(parameters.model.squared_widths_of(contexts, arms)[0])
        if not (np.isfinite(self.log_odds).all() and np.isfinite(self.widths).all()):
            raise InputError("the context is too large: the numbers overflow")
        columns, horizon = np.searchsorted(planner.shown, eligible), self.settings.horizon
        self.cascade, spread = planner.cascade.choose(columns), _spread(parameters, session)
        self.first = sigmoid(self.log_odds)
        self.chances = self._at_positions(self.first)
        self.rates = np.ones((horizon, len(eligible))) if self.cascade.rates is None else self.cascade.rates
        self.factors: Floats | None = None
        if spread is not None:
            # Without repeats, one order for all positions.
            turns, keys = range(horizon) if self.settings.repeats else [0] * horizon, planner.arm_keys[columns]
            self.factors = np.concatenate([spread.factors(slice(0, 1), keys, np.float64, turn) for turn in turns])

    def _at_positions(self, first: Floats) -> Floats:
        """Return the probabilities at each position of arms that have `first` at the first one: (H, columns)."""
        return np.stack([self.cascade.chances(first, h) for h in range(self.settings.horizon)])

    def positions(
        self,
        slate: list[int],
        modes: Sequence[str],
        reasons: dict[int, tuple[Contribution, ...]],
        way: str,
    ) -> list[Position]:
        """Explain every position of the slate, which was chosen in this way."""
        explored = [mode == "explore" for mode in modes]
        if way not in (SCORES, GREEDY):
            rounds = self._fillers(slate, 0, again=self.settings.repeats and way != "order")
        elif self.policy is MyopicUcb:
            rounds = self._myopic(slate)
        elif self.settings.repeats:
            rounds = self._with_repeats(explored)
        else:
            rounds = self._without_repeats(slate, explored)
        return [
            self._position(slate, h, mode, way, reasons, *round_)
            for h, (mode, round_) in enumerate(zip(modes, rounds, strict=True))
        ]

    def _with_repeats(self, explored: list[bool]) -> Iterator[_Round]:
        values = optimal_values(self.first[None, :], self.rewards, self.settings.horizon, self.cascade)[0]
        for h, (explore, after) in enumerate(zip(explored, [*values[1:].tolist(), 0.0], strict=False)):
            yield np.arange(len(self.arms)), after, h, *self._scores(after, explore, h)

    def _myopic(self, slate: list[int]) -> Iterator[_Round]:
        columns = np.arange(len(self.arms))
        for arm in slate:
            yield columns, 0.0, 0, *self._scores(0.0, True, 0)
            if not self.settings.repeats:
                columns = columns[self.arms[columns] != arm]

    def _scores(self, after: float, explore: bool, h: int) -> tuple[Floats, Floats]:
        q = self._q(self.chances[h], after, h)
        if not explore:
            return q, q
        widths, gains = self.parameters.beta * self.widths, self.rewards - self.rates[h] * after
        bonus = bonus_named(self.settings.bonus).of(self.chances[h], widths, gains)
        return q, q + (bonus if self.factors is None else self.factors[h] * bonus)

    def _without_repeats(self, slate: list[int], explored: list[bool]) -> Iterator[_Round]:
        optimistic = self.chances
        if any(explored):
            widths = self.parameters.beta * self.widths
            factors = None if self.factors is None else self.factors[0]
            optimistic = bonus_named(self.settings.bonus).optimistic(self.log_odds, widths, factors)
            optimistic = self._at_positions(optimistic)
        values, optimistic_values = self._values(self.chances), self._values(optimistic)
        first = 0
        for h, (arm, explore) in enumerate(zip(slate, explored, strict=True)):
            left = self.settings.horizon - h - 1
            place = int(np.flatnonzero(self.arms == arm)[0])
            if place < first:
                yield from self._fillers(slate, h)
                return
            q = self._q(self.chances[h], values[1:, left], h)
            score = self._q(optimistic[h], optimistic_values[1:, left], h) if explore else q
            yield np.arange(first, len(self.arms)), float(values[place + 1, left]), h, q, score
            first = place + 1

    def _fillers(self, slate: list[int], start: int, *, again: bool = False) -> Iterator[_Round]:
        """Explain the positions from `start` on, which show arms that no score has chosen, perhaps `again`."""
        after = [0.0]  # revenue of the slate behind each position, from the last one on
        for h in range(len(slate) - 1, start, -1):
            place = self.arms == slate[h]
            after.append(float(self._q(self.chances[h], after[-1], h)[place][0]))
        for h in range(start, len(slate)):
            behind = after[len(slate) - 1 - h]
            q = self._q(self.chances[h], behind, h)
            gone = [] if again else slate[:h]
            yield np.flatnonzero(~np.isin(self.arms, gone)), behind, h, q, q

    def _values(self, chances: Floats) -> Floats:
        """Return V(i, m), the best revenue from the columns i, i+1, … with m displays: (H, n) → (n+1, H+1)."""
        horizon, columns = chances.shape
        values = np.zeros((columns + 1, horizon + 1))
        for i in range(columns - 1, -1, -1):
            f, s = chances[::-1, i], self.rates[::-1, i]  # with m = 1 … H displays left
            shown = f * self.rewards[i] + (1 - f) * s * values[i + 1, :-1]
            np.maximum(values[i + 1, 1:], shown, out=values[i, 1:])
        return values

    def _q(self, chances: Floats, after: Floats | float, h: int) -> Floats:
        """Return f e + (1 − f) s V of every column at position h; `after` is V."""
        return np.asarray(chances * self.rewards + (1 - chances) * self.rates[h] * after)

    def _position(
        self,
        slate: list[int],
        h: int,
        mode: str,
        way: str,
        reasons: dict[int, tuple[Contribution, ...]],
        columns: Ints,
        after: float,
        place: int,
        q: Floats,
        score: Floats,
    ) -> Position:
        catalogue, factors = self.parameters.arms, self.factors
        learned = self.parameters.answers is not None
        effect = position_effect(self.parameters, place)
        in_order = columns[np.argsort(self.arms[columns], kind="stable")]  # the order of the catalogue
        return Position(
            position=h + 1,
            continuation=after,
            choice=catalogue[slate[h]].arm,
            mode=mode,
            way=way,
            out=out_of(self.parameters, self.arms, slate[:h], frozenset(self.arms[columns].tolist())),
            arms=tuple(
                Candidate(
                    arm=catalogue[self.arms[column]].arm,
                    probability=float(self.chances[place, column]),
                    q=float(q[column]),
                    width=float(self.widths[column]),
                    bonus=float(score[column] - q[column]),
                    score=float(score[column]),
                    answer_rate=float(self.rates[place, column]) if learned else None,
                    spread=None if factors is None else float(factors[place, column]),
                    contributions=strongest_first(reasons[int(self.arms[column])] + effect),
                )
                for column in in_order.tolist()
            ),
        )


def _in_order(
    parameters: Parameters,
    planner: Planner,
    context: Floats,
    eligible: Ints,
    session: str | None,
    *,
    explores: bool,
) -> Ints:
    """Return the arms in the order in which a slate without repeats shows them, as serving computes it."""
    columns = planner.by_falling_revenue
    cascade = planner.cascade.choose(columns).astype(planner.dtype)
    if cascade.rates is not None and parameters.settings.policy != MyopicUcb.name:
        heads, contexts = planner.heads, context[None, :]
        chances = heads.probabilities(contexts)
        if explores:
            bonus, spread = bonus_named(parameters.settings.bonus), _spread(parameters, session)
            factors = None if spread is None else spread.factors(slice(0, 1), planner.arm_keys, planner.dtype)
            chances = bonus.optimistic(heads.log_odds(contexts), parameters.beta * heads.widths(contexts), factors)
        rewards = planner.rewards[planner.shown][columns].astype(planner.dtype)
        columns = columns[by_worth(chances.T[columns], rewards, cascade.rates, cascade.odds)[:, 0]]
    arms = planner.shown[columns]
    return arms[np.isin(arms, eligible)]


def out_of(parameters: Parameters, eligible: Ints, shown: list[int], competing: Collection[int]) -> dict[str, str]:
    """Return why arms do not compete for the position after those shown."""

    def why(index: int) -> str:
        if not parameters.arms[index].active:
            return "retired"
        if index not in eligible:
            return "excluded by the arrival"
        return f"shown at position {shown.index(index) + 1}" if index in shown else "its turn in the order is over"

    return {arm.arm: why(index) for index, arm in enumerate(parameters.arms) if index not in competing}


def _spread(parameters: Parameters, session: str | None) -> Spread | None:
    """Return the spread of this session; None if there is none."""
    if session is None or not has_spread(parameters):
        return None
    settings = parameters.settings
    return Spread(share=settings.spread, keys=stable_keys([session], settings.salt))


def has_spread(parameters: Parameters) -> bool:
    """Return whether sessions differ in their bonuses under a version."""
    return parameters.settings.spread > 0 and hasattr(parameters.policy(), "spread")
