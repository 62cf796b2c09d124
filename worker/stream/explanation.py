"""Why this ad at this position: every number behind a slate, in float64, beside the choice that serving makes.

The choice comes out of the very kernel that serves (float32). The numbers are computed anew, the plain way, so a choice
between two arms whose scores agree in the first seven digits may look like the second best.

With repeats, all eligible arms compete at every position:

    score = q + bonus        q = Q̂_h(k) = f e + (1 − f) V_{h+1}

where the bonus is 0 if the position exploits; `myopic-ucb` takes V_{h+1} = 0. Without repeats (math.md §7) arms compete
in the order of falling revenue, so at a position only those after the last one shown do. There, showing k with m
displays left earns f_k e_k + (1 − f_k) V(k+1, m−1): q under the estimate, score under the optimistic probabilities if
the session explores, and the bonus is the difference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
    """A position of the slate: who competed, who won, what can still be earned when it is passed over."""

    position: int
    continuation: float
    choice: str | None
    mode: str
    arms: tuple[Candidate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A slate with its reasons; `notes` say what serving does beyond that."""

    slate: tuple[str, ...]
    positions: tuple[Position, ...]
    notes: tuple[str, ...]


def explain(parameters: Parameters, context: Floats, excluded: Ints) -> Explanation:
    """Plan one session with this context, (d,), without the arms at the indices `excluded`."""
    parameters = _with_radius(parameters, context)
    planner = parameters.planner()
    eligible = np.array([], dtype=np.intp) if planner is None else np.setdiff1d(planner.shown, excluded)
    if planner is None or not len(eligible):
        nothing = Position(position=1, continuation=0.0, choice=None, mode="none", arms=())
        return Explanation(slate=(), positions=(nothing,), notes=("no arm is eligible: the slate is empty",))
    with np.errstate(all="ignore"):
        scene = _Scene(parameters, context, eligible)
        masked = planner.masked([excluded.tolist()])
        arms, explored = _served(parameters, planner, context, masked)
        positions = scene.positions(arms, explored)
    return Explanation(
        slate=tuple(position.choice for position in positions if position.choice is not None),
        positions=tuple(positions),
        notes=_notes(parameters),
    )


def _with_radius(parameters: Parameters, context: Floats) -> Parameters:
    """Turn "theory" into a number where the record has none: from its observations and this context."""
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
    """Return the arms that serving shows and whether each position explores, by the kernel that serves."""
    settings = parameters.settings
    policy = Greedy() if policy_named(settings.policy).draws else parameters.policy()
    slates = policy.slates(planner, context[None, :], masked)
    arms = slates.arms[0].tolist()
    length = arms.index(NO_ARM) if NO_ARM in arms else len(arms)
    return arms[:length], slates.explored[0, :length].tolist()


def _notes(parameters: Parameters) -> tuple[str, ...]:
    settings = parameters.settings
    notes = []
    if parameters.folds < settings.warmup:
        notes.append(
            f"warm-up, {parameters.folds} of {settings.warmup} folds: serving draws any eligible arm at random; "
            f"shown is what {settings.policy} would choose"
        )
    elif policy_named(settings.policy) is Random:
        notes.append("random policy: serving draws any eligible arm; shown is what greedy would choose")
    elif policy_named(settings.policy).draws:
        notes.append(f"epsilon-greedy: with probability {settings.epsilon:g} a position shows any eligible arm instead")
    if settings.random_share > 0:
        notes.append(f"{settings.random_share:.1%} of sessions are drawn at random instead (random_share)")
    if policy_named(settings.policy).is_selective and not parameters.thresholds:
        notes.append("no exploration thresholds for this horizon: every position explores")
    return tuple(notes)


class _Scene:
    """One context and the arms eligible for it, by falling revenue where arms may not repeat; float64."""

    def __init__(self, parameters: Parameters, context: Floats, eligible: Ints) -> None:
        self.parameters, self.settings = parameters, parameters.settings
        rewards = parameters.rewards
        if not self.settings.repeats:
            eligible = eligible[np.argsort(-rewards[eligible], kind="stable")]
        self.eligible = eligible
        self.place = {int(arm): place for place, arm in enumerate(eligible)}
        self.rewards = rewards[eligible]
        self.odds = parameters.model.log_odds_of(context[None, :], eligible[None, :])[0]
        self.chances = sigmoid(self.odds)
        self.widths = np.sqrt(parameters.model.squared_widths_of(context[None, :], eligible[None, :])[0])
        if not (np.isfinite(self.odds).all() and np.isfinite(self.widths).all()):
            raise InputError("the context is too large: the numbers overflow")

    def positions(self, arms: list[int], explored: list[bool]) -> list[Position]:
        """Explain every position of the slate."""
        if policy_named(self.settings.policy) is MyopicUcb:
            return self._myopic(arms)
        if self.settings.repeats:
            return self._with_repeats(arms, explored)
        return self._without_repeats(arms, explored)

    def _with_repeats(self, arms: list[int], explored: list[bool]) -> list[Position]:
        values = optimal_values(self.chances[None, :], self.rewards, self.settings.horizon)[0]
        ahead = [*values[1:].tolist(), 0.0]
        everyone = np.arange(len(self.eligible))
        return [
            self._position(h, arm, explored[h], ahead[h], everyone, *self._scores(ahead[h], everyone, explored[h]))
            for h, arm in enumerate(arms)
        ]

    def _myopic(self, arms: list[int]) -> list[Position]:
        positions = []
        left = np.arange(len(self.eligible))
        for h, arm in enumerate(arms):
            positions.append(self._position(h, arm, True, 0.0, left, *self._scores(0.0, left, True)))
            if not self.settings.repeats:
                left = left[left != self.place[arm]]
        return positions

    def _scores(self, ahead: float, places: Ints, explore: bool) -> tuple[Floats, Floats]:
        chances, gains = self.chances[places], self.rewards[places] - ahead
        q = ahead + chances * gains
        if not explore:
            return q, q
        bonus = bonus_named(self.settings.bonus)
        return q, q + bonus.of(chances, self.parameters.beta * self.widths[places], gains)

    def _without_repeats(self, arms: list[int], explored: list[bool]) -> list[Position]:
        horizon, beta = self.settings.horizon, self.parameters.beta
        hoped = sigmoid(self.odds + beta * self.widths) if any(explored) else self.chances
        estimated, optimistic = self._programme(self.chances), self._programme(hoped)
        positions, first = [], 0
        for h, arm in enumerate(arms):
            places = np.arange(first, len(self.eligible))
            left = horizon - h - 1
            q = _worth(self.chances, self.rewards, estimated, places, left)
            score = _worth(hoped, self.rewards, optimistic, places, left) if explored[h] else q
            first = self.place[arm] + 1
            positions.append(self._position(h, arm, explored[h], float(estimated[first, left]), places, q, score))
        return positions

    def _programme(self, chances: Floats) -> Floats:
        """Return V(i, m), the best revenue from the arms i, i+1, … with m displays: (n+1, H+1)."""
        values = np.zeros((len(chances) + 1, self.settings.horizon + 1))
        for i in range(len(chances) - 1, -1, -1):
            shown = values[i + 1, :-1] + chances[i] * (self.rewards[i] - values[i + 1, :-1])
            np.maximum(values[i + 1, 1:], shown, out=values[i, 1:])
        return values

    def _position(
        self, h: int, arm: int, explore: bool, continuation: float, places: Ints, q: Floats, score: Floats
    ) -> Position:
        names = self.parameters.arms
        order = places[np.argsort(self.eligible[places], kind="stable")]  # in the order of the catalogue
        by_place = {place: (a, b) for place, a, b in zip(places.tolist(), q.tolist(), score.tolist(), strict=True)}
        return Position(
            position=h + 1,
            continuation=continuation,
            choice=names[arm].arm,
            mode=self._mode(explore),
            arms=tuple(
                Candidate(
                    arm=names[int(self.eligible[place])].arm,
                    probability=float(self.chances[place]),
                    q=by_place[place][0],
                    width=float(self.widths[place]),
                    bonus=by_place[place][1] - by_place[place][0],
                    score=by_place[place][1],
                )
                for place in order.tolist()
            ),
        )

    def _mode(self, explore: bool) -> str:
        if self.parameters.folds < self.settings.warmup:
            return "warmup"
        if policy_named(self.settings.policy) is Random:
            return "random"
        return "explore" if explore else "exploit"


def _worth(chances: Floats, rewards: Floats, values: Floats, places: Ints, left: int) -> Floats:
    after = values[places + 1, left]
    return np.asarray(after + chances[places] * (rewards[places] - after))
