"""The reasons for a slate: every number behind it, in float64, beside the choice that serving makes.

The choice comes from the kernel that serves, in float32. The numbers are computed again in float64, so of two arms
whose scores agree in the first seven digits the choice may seem to be the second best.

A display of arm k at position h is answered with probability s = min(1, ρ_k r_h), 1 where rates are not learned
(docs/math.md §8). With repeats, all eligible arms compete at every position:

    score = q + s · bonus        q = Q̂_h(k) = s [f e + (1 − f) V_{h+1}]

The bonus is 0 if the position exploits; `myopic-ucb` takes every position as the first and the last one: V_{h+1} = 0
and s of position 1. Without repeats (docs/math.md §7) arms are shown in an order, by falling reward or, where users
leave, by ρ f e / (1 − ρ (1 − f)), so only those after the last one shown compete. With m displays left, arm k earns
s [f_k e_k + (1 − f_k) V(k+1, m−1)]: q under the estimate, score under the optimistic probabilities of the bonus if the
session explores. The bonus is the difference. A slate that ends too early is filled up with other arms, which compete
for the rest by the revenue of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.bonuses import bonus_named, theory_radius
from worker.bandit.ordering import by_worth
from worker.bandit.planning import Masked, Planner, optimal_values
from worker.bandit.policies import Greedy, MyopicUcb, Random, policy_named
from worker.errors import InputError
from worker.stream.parameters import Parameters
from worker.stream.tastes import Contribution, context_columns, contributions


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An arm that competed for a position.

    answer_rate : probability that its display is answered; None where rates are not learned
    contributions : the parts of its log-odds, the largest first
    """

    arm: str
    probability: float
    q: float
    width: float
    bonus: float
    score: float
    answer_rate: float | None = None
    contributions: tuple[Contribution, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A position of the slate: the competing arms, the choice, and the expected revenue after a pass (continuation)."""

    position: int
    continuation: float
    choice: str | None
    mode: str
    arms: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A slate with its reasons; `notes` name what serving leaves to chance."""

    slate: tuple[str, ...]
    positions: tuple[Position, ...]
    notes: tuple[str, ...]


def explain(
    parameters: Parameters, context: Floats, excluded: Ints, *, names: tuple[str, ...] | None = None
) -> Explanation:
    """Plan one session with this context, (d,), as it came, without the arms at the indices `excluded`.

    `names` are those of the numbers of the context, if they are not those of the version.
    """
    given, context = context, parameters.prepared(context[None, :])[0]
    parameters = _with_radius(parameters, context)
    planner = parameters.planner()
    eligible = np.array([], dtype=np.intp) if planner is None else np.setdiff1d(planner.shown, excluded)
    if planner is None or not len(eligible):
        nothing = Position(position=1, continuation=0.0, choice=None, mode="none", arms=())
        return Explanation(slate=(), positions=(nothing,), notes=("no arm is eligible: the slate is empty",))
    with np.errstate(all="ignore"):
        slate, explored = _served(parameters, planner, context, planner.masked([excluded.tolist()]))
        contest = _Contest(parameters, planner, context, eligible, explores=any(explored))
        reasons = {
            index: contributions(parameters, index, given, context, names or context_columns(parameters))
            for index in eligible.tolist()
        }
        positions = contest.positions(slate, explored, reasons)
    return Explanation(
        slate=tuple(position.choice for position in positions if position.choice is not None),
        positions=tuple(positions),
        notes=_notes(parameters),
    )


def _with_radius(parameters: Parameters, context: Floats) -> Parameters:
    """Compute the radius of "theory" if the record has none, from its observations and this context."""
    if parameters.settings.beta != "theory" or parameters.radius > 0:
        return parameters
    radius = theory_radius(
        dim=parameters.settings.model_dim,
        arms=len(parameters.arms),
        largest_reward=float(parameters.rewards.max()),
        largest_norm=math.hypot(1.0, *context.tolist()),
        ridge=parameters.settings.ridge,
        displays=parameters.observations,
    )
    return replace(parameters, radius=radius)


def _served(
    parameters: Parameters, planner: Planner, context: Floats, masked: Masked | None
) -> tuple[list[int], list[bool]]:
    """Return the arms that serving shows, and whether each position explores; greedy for a policy that draws.

    There is no session to break ties with a threshold by, so all of them explore.
    """
    policy = Greedy() if policy_named(parameters.settings.policy).draws else replace(parameters, ties=()).policy()
    slates = policy.slates(planner, context[None, :], masked)
    arms = slates.arms[0].tolist()
    length = arms.index(NO_ARM) if NO_ARM in arms else len(arms)
    return arms[:length], slates.explored[0, :length].tolist()


def _notes(parameters: Parameters) -> tuple[str, ...]:
    settings = parameters.settings
    policy = policy_named(settings.policy)
    notes = []
    if parameters.folds < settings.warmup:
        notes.append(
            f"warm-up, {parameters.folds} of {settings.warmup} folds: serving draws any eligible arm at random; "
            f"this is the slate of {settings.policy}"
        )
    elif policy is Random:
        notes.append("random policy: serving draws any eligible arm; this is the slate of greedy")
    elif policy.draws:
        notes.append(f"epsilon-greedy: with probability {settings.epsilon:g} a position shows any eligible arm instead")
    if settings.random_share > 0:
        notes.append(f"{settings.random_share:.1%} of sessions have a random slate instead (random_share)")
    if policy.is_selective and not parameters.thresholds:
        notes.append("no exploration thresholds for this horizon: every position explores")
    if policy.is_selective and parameters.policy().needs_chance:
        notes.append(
            "ties: of the sessions with exactly the score of a threshold, serving lets a share explore, by their ids; "
            "here all of them explore"
        )
    return tuple(notes)


#: A round of the contest: columns that compete, revenue after the position, q, score and answer rates of all columns.
_Round: TypeAlias = tuple[Ints, float, Floats, Floats, Floats]


class _Contest:
    """The eligible arms of one session, one column each, in float64; in the order of showing if arms may not repeat.

    `rates` (H, columns) are the answer rates.
    """

    def __init__(
        self, parameters: Parameters, planner: Planner, context: Floats, eligible: Ints, *, explores: bool
    ) -> None:
        self.parameters, self.settings = parameters, parameters.settings
        self.policy = policy_named(self.settings.policy)
        if not self.settings.repeats:
            eligible = _in_order(parameters, planner, context, eligible, explores=explores)
        self.arms, self.rewards = eligible, parameters.rewards[eligible]
        contexts, arms = context[None, :], eligible[None, :]
        self.log_odds = parameters.model.log_odds_of(contexts, arms)[0]
        self.widths = np.sqrt(parameters.model.squared_widths_of(contexts, arms)[0])
        if not (np.isfinite(self.log_odds).all() and np.isfinite(self.widths).all()):
            raise InputError("the context is too large: the numbers overflow")
        self.chances = sigmoid(self.log_odds)
        known = parameters.rates
        shape = (self.settings.horizon, len(eligible))
        self.rates = np.ones(shape) if known is None else known.of_arms(eligible)

    def positions(
        self, slate: list[int], explored: list[bool], reasons: dict[int, tuple[Contribution, ...]]
    ) -> list[Position]:
        """Explain every position of the slate."""
        if self.policy is MyopicUcb:
            rounds = self._myopic(slate)
        elif self.settings.repeats:
            rounds = self._with_repeats(explored)
        else:
            rounds = self._without_repeats(slate, explored)
        return [
            self._position(number, arm, explore, reasons, *round_)
            for number, (arm, explore, round_) in enumerate(zip(slate, explored, rounds, strict=True), start=1)
        ]

    def _with_repeats(self, explored: list[bool]) -> Iterator[_Round]:
        values = optimal_values(self.chances[None, :], self.rewards, self.settings.horizon, self.rates)[0]
        for h, (explore, after) in enumerate(zip(explored, [*values[1:].tolist(), 0.0], strict=False)):
            yield np.arange(len(self.arms)), after, *self._scores(after, explore, self.rates[h])

    def _myopic(self, slate: list[int]) -> Iterator[_Round]:
        columns = np.arange(len(self.arms))
        for arm in slate:
            yield columns, 0.0, *self._scores(0.0, True, self.rates[0])
            if not self.settings.repeats:
                columns = columns[self.arms[columns] != arm]

    def _scores(self, after: float, explore: bool, rates: Floats) -> tuple[Floats, Floats, Floats]:
        q = self._q(self.chances, after, rates)
        if not explore:
            return q, q, rates
        widths = self.parameters.beta * self.widths
        bonus = bonus_named(self.settings.bonus).of(self.chances, widths, self.rewards - after)
        return q, q + rates * bonus, rates

    def _without_repeats(self, slate: list[int], explored: list[bool]) -> Iterator[_Round]:
        optimistic = self.chances
        if any(explored):
            optimism = self.parameters.beta * self.widths
            optimistic = bonus_named(self.settings.bonus).optimistic(self.log_odds, optimism)
        values, optimistic_values = self._values(self.chances), self._values(optimistic)
        first = 0
        for h, (arm, explore) in enumerate(zip(slate, explored, strict=True)):
            left = self.settings.horizon - h - 1
            place = int(np.flatnonzero(self.arms == arm)[0])
            if place < first:
                yield from self._fillers(slate, h)
                return
            q = self._q(self.chances, values[1:, left], self.rates[h])
            score = self._q(optimistic, optimistic_values[1:, left], self.rates[h]) if explore else q
            yield np.arange(first, len(self.arms)), float(values[place + 1, left]), q, score, self.rates[h]
            first = place + 1

    def _fillers(self, slate: list[int], start: int) -> Iterator[_Round]:
        """Explain the positions from `start` on, which show what is left after the end of the plan."""
        after = [0.0]  # revenue of the slate behind each position, from the last one on
        for h in range(len(slate) - 1, start, -1):
            place = self.arms == slate[h]
            after.append(float(self._q(self.chances, after[-1], self.rates[h])[place][0]))
        for h in range(start, len(slate)):
            behind = after[len(slate) - 1 - h]
            q = self._q(self.chances, behind, self.rates[h])
            yield np.flatnonzero(~np.isin(self.arms, slate[:h])), behind, q, q, self.rates[h]

    def _values(self, chances: Floats) -> Floats:
        """Return V(i, m), the best revenue from the columns i, i+1, … with m displays: (n+1, H+1)."""
        values = np.zeros((len(chances) + 1, self.settings.horizon + 1))
        rates = self.rates[::-1]  # with m = 1 … H displays left
        for i in range(len(chances) - 1, -1, -1):
            ahead = values[i + 1, :-1]
            shown = rates[:, i] * (ahead + chances[i] * (self.rewards[i] - ahead))
            np.maximum(values[i + 1, 1:], shown, out=values[i, 1:])
        return values

    def _q(self, chances: Floats, after: Floats | float, rates: Floats) -> Floats:
        """Return s [f e + (1 − f) V] of every column; `after` is V."""
        return np.asarray(rates * (after + chances * (self.rewards - after)))

    def _position(
        self,
        number: int,
        arm: int,
        explore: bool,
        reasons: dict[int, tuple[Contribution, ...]],
        columns: Ints,
        after: float,
        q: Floats,
        score: Floats,
        rates: Floats,
    ) -> Position:
        catalogue = self.parameters.arms
        learned = self.parameters.answers is not None
        in_order = columns[np.argsort(self.arms[columns], kind="stable")]  # the order of the catalogue
        return Position(
            position=number,
            continuation=after,
            choice=catalogue[arm].arm,
            mode=self._mode(explore),
            arms=tuple(
                Candidate(
                    arm=catalogue[self.arms[column]].arm,
                    probability=float(self.chances[column]),
                    q=float(q[column]),
                    width=float(self.widths[column]),
                    bonus=float(score[column] - q[column]),
                    score=float(score[column]),
                    answer_rate=float(rates[column]) if learned else None,
                    contributions=reasons[int(self.arms[column])],
                )
                for column in in_order.tolist()
            ),
        )

    def _mode(self, explore: bool) -> str:
        if self.parameters.folds < self.settings.warmup:
            return "warmup"
        if self.policy is Random:
            return "random"
        return "explore" if explore else "exploit"


def _in_order(parameters: Parameters, planner: Planner, context: Floats, eligible: Ints, *, explores: bool) -> Ints:
    """Return the arms in the order in which a slate without repeats shows them, as serving computes it."""
    columns = planner.by_falling_revenue
    if planner.answers is not None and parameters.settings.policy != MyopicUcb.name:
        heads, contexts = planner.heads, context[None, :]
        chances = heads.probabilities(contexts)
        if explores:
            bonus = bonus_named(parameters.settings.bonus)
            chances = bonus.optimistic(heads.log_odds(contexts), parameters.beta * heads.widths(contexts))
        rewards = planner.rewards[planner.shown][columns].astype(planner.dtype)
        rates = planner.answers.arms[planner.shown][columns].astype(planner.dtype)
        columns = columns[by_worth(chances.T[columns], rewards, rates, planner.answers.positions)[:, 0]]
    arms = planner.shown[columns]
    return arms[np.isin(arms, eligible)]
