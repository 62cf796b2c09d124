"""The reasons for a slate: every number behind it, in float64, beside the choice that serving makes.

The choice comes from the kernel that serves, in float32. The numbers are computed again in float64, so of two arms
whose scores agree in the first seven digits the choice may seem to be the second best.

With repeats, all eligible arms compete at every position:

    score = q + bonus        q = Q̂_h(k) = f e + (1 − f) V_{h+1}

The bonus is 0 if the position exploits; `myopic-ucb` has V_{h+1} = 0. Without repeats (docs/math.md §7) arms are shown
by falling reward, so only those after the last one shown compete. With m displays left, arm k earns
f_k e_k + (1 − f_k) V(k+1, m−1): q under the estimate, score under optimistic probabilities if the session explores. The
bonus is the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats, Ints, sigmoid
from worker.bandit.bonuses import bonus_named
from worker.bandit.planning import Masked, Planner, optimal_values
from worker.bandit.policies import Greedy, MyopicUcb, Random, policy_named
from worker.bandit.schedule import theory_radius
from worker.errors import InputError
from worker.stream.parameters import Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An arm that competed for a position."""

    arm: str
    probability: float
    q: float
    width: float
    bonus: float
    score: float


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


def explain(parameters: Parameters, context: Floats, excluded: Ints) -> Explanation:
    """Plan one session with this context, (d,), as it came, without the arms at the indices `excluded`."""
    context = parameters.prepared(context[None, :])[0]
    parameters = _with_radius(parameters, context)
    planner = parameters.planner()
    eligible = np.array([], dtype=np.intp) if planner is None else np.setdiff1d(planner.shown, excluded)
    if planner is None or not len(eligible):
        nothing = Position(position=1, continuation=0.0, choice=None, mode="none", arms=())
        return Explanation(slate=(), positions=(nothing,), notes=("no arm is eligible: the slate is empty",))
    with np.errstate(all="ignore"):
        contest = _Contest(parameters, context, eligible)
        positions = contest.positions(*_served(parameters, planner, context, planner.masked([excluded.tolist()])))
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
        dim=parameters.settings.dim,
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
    """Return the arms that serving shows, and whether each position explores; greedy for a policy that draws."""
    policy = Greedy() if policy_named(parameters.settings.policy).draws else parameters.policy()
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
    return tuple(notes)


#: A round of the contest: columns that compete, revenue after the position, q and score of all columns.
_Round: TypeAlias = tuple[Ints, float, Floats, Floats]


class _Contest:
    """The eligible arms of one session, one column each, in float64; by falling reward if arms may not repeat."""

    def __init__(self, parameters: Parameters, context: Floats, eligible: Ints) -> None:
        rewards = parameters.rewards
        if not parameters.settings.repeats:
            eligible = eligible[np.argsort(-rewards[eligible], kind="stable")]
        self.parameters, self.settings = parameters, parameters.settings
        self.policy = policy_named(self.settings.policy)
        self.arms, self.rewards = eligible, rewards[eligible]
        contexts, arms = context[None, :], eligible[None, :]
        self.log_odds = parameters.model.log_odds_of(contexts, arms)[0]
        self.widths = np.sqrt(parameters.model.squared_widths_of(contexts, arms)[0])
        if not (np.isfinite(self.log_odds).all() and np.isfinite(self.widths).all()):
            raise InputError("the context is too large: the numbers overflow")
        self.chances = sigmoid(self.log_odds)

    def positions(self, slate: list[int], explored: list[bool]) -> list[Position]:
        """Explain every position of the slate."""
        if self.policy is MyopicUcb:
            rounds = self._myopic(slate)
        elif self.settings.repeats:
            rounds = self._with_repeats(explored)
        else:
            rounds = self._without_repeats(slate, explored)
        return [
            self._position(number, arm, explore, *round_)
            for number, (arm, explore, round_) in enumerate(zip(slate, explored, rounds, strict=True), start=1)
        ]

    def _with_repeats(self, explored: list[bool]) -> Iterator[_Round]:
        values = optimal_values(self.chances[None, :], self.rewards, self.settings.horizon)[0]
        for explore, after in zip(explored, [*values[1:].tolist(), 0.0], strict=False):
            yield np.arange(len(self.arms)), after, *self._scores(after, explore)

    def _myopic(self, slate: list[int]) -> Iterator[_Round]:
        columns = np.arange(len(self.arms))
        for arm in slate:
            yield columns, 0.0, *self._scores(0.0, True)
            if not self.settings.repeats:
                columns = columns[self.arms[columns] != arm]

    def _scores(self, after: float, explore: bool) -> tuple[Floats, Floats]:
        q = self._q(self.chances, after)
        if not explore:
            return q, q
        widths = self.parameters.beta * self.widths
        return q, q + bonus_named(self.settings.bonus).of(self.chances, widths, self.rewards - after)

    def _without_repeats(self, slate: list[int], explored: list[bool]) -> Iterator[_Round]:
        optimism = self.parameters.beta * self.widths
        optimistic = sigmoid(self.log_odds + optimism) if any(explored) else self.chances
        values, optimistic_values = self._values(self.chances), self._values(optimistic)
        first = 0
        for number, (arm, explore) in enumerate(zip(slate, explored, strict=True), start=1):
            left = self.settings.horizon - number
            columns = np.arange(first, len(self.arms))
            q = self._q(self.chances, values[1:, left])
            score = self._q(optimistic, optimistic_values[1:, left]) if explore else q
            first = int(np.flatnonzero(self.arms == arm)[0]) + 1
            yield columns, float(values[first, left]), q, score

    def _values(self, chances: Floats) -> Floats:
        """Return V(i, m), the best revenue from the columns i, i+1, … with m displays: (n+1, H+1)."""
        values = np.zeros((len(chances) + 1, self.settings.horizon + 1))
        for i in range(len(chances) - 1, -1, -1):
            shown = values[i + 1, :-1] + chances[i] * (self.rewards[i] - values[i + 1, :-1])
            np.maximum(values[i + 1, 1:], shown, out=values[i, 1:])
        return values

    def _q(self, chances: Floats, after: Floats | float) -> Floats:
        """Return f e + (1 − f) V of every column; `after` is V."""
        return np.asarray(after + chances * (self.rewards - after))

    def _position(
        self, number: int, arm: int, explore: bool, columns: Ints, after: float, q: Floats, score: Floats
    ) -> Position:
        catalogue = self.parameters.arms
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
