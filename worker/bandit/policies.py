"""Which slate each session gets, and which positions explored.

A policy is a small value with one verb, `slates(planner, contexts, …)`; to add one, write a class and a line in
`POLICIES`. Chance enters as an argument: `uniforms` (n, H, 2) in [0, 1), from a generator in an experiment, from a
stable hash of the session on a stream. So do `keys` (n,), by which sessions spread their optimism.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, Floats, Ints, Keys
from worker.bandit.bonuses import BONUSES, CURVE, Bonus, PaperBonus, Spread
from worker.bandit.ordering import both_slates, fixed_slates, greedy_slates, optimistic_slates
from worker.bandit.planning import Masked, Optimism, Planner
from worker.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slates:
    """Slates for n sessions.

    Parameters
    ----------
    arms : (n, H), NO_ARM after the end of a shorter slate
    explored : (n, H), whether the choice served learning rather than revenue; false where there is no arm
    propensities : (n, H), probability of the choice given the earlier positions
    """

    arms: Ints
    explored: NDArray[np.bool_]
    propensities: Floats

    @classmethod
    def certain(cls, arms: Ints, explored: NDArray[np.bool_] | bool) -> Slates:
        """Return slates that were not left to chance."""
        return cls(arms=arms, explored=explored & (arms != NO_ARM), propensities=np.ones(arms.shape))


class Unplanned(NamedTuple):
    """Sessions to plan; see `Policy.slates`."""

    contexts: Floats
    masked: Masked | None
    uniforms: Floats | None
    keys: Keys | None

    @property
    def chance(self) -> Floats:
        """The uniforms, for a policy that needs them; raise `InputError` if there are none."""
        if self.uniforms is None:
            raise InputError("this policy draws at random: give it uniforms")
        return self.uniforms


class Policy(ABC):
    """A rule that gives each session its slate; its dataclass fields are how much it explores."""

    name: ClassVar[str]
    #: Whether its slates are left to chance.
    draws: ClassVar[bool] = False
    #: Whether it adds a bonus to Q, with repeats and without.
    has_bonus: ClassVar[tuple[bool, bool]] = (False, False)
    #: Whether only some sessions explore, by budget or thresholds.
    is_selective: ClassVar[bool] = False
    #: Whether its slates depend on what is learned.
    uses_model: ClassVar[bool] = True

    @property
    def needs_chance(self) -> bool:
        """Whether `slates` needs `uniforms`."""
        return self.draws

    @classmethod
    def under(cls, **settings: Any) -> Self:
        """Return the policy under settings by name, of which it takes those that it has."""
        return cls(**{name: settings[name] for name in cls.__annotations__ if name in settings})

    def slates(
        self,
        planner: Planner,
        contexts: Floats,
        masked: Masked | None = None,
        uniforms: Floats | None = None,
        keys: Keys | None = None,
    ) -> Slates:
        """Plan contexts (n, d). Optimism is spread by `keys` (n,), stable numbers of the sessions, if there are any."""
        return self.plan(planner, Unplanned(contexts, masked, uniforms, keys))

    @abstractmethod
    def plan(self, planner: Planner, sessions: Unplanned) -> Slates:
        """Return the slates of sessions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy(Policy):
    """Always the best slate under the estimate; never explores, and so may get stuck."""

    name: ClassVar[str] = "greedy"

    def plan(self, planner: Planner, sessions: Unplanned) -> Slates:
        return Slates.certain(greedy_arms(planner, sessions.contexts, sessions.masked), False)


def greedy_arms(planner: Planner, contexts: Floats, masked: Masked | None) -> Ints:
    """Return the best slates under the estimate, with or without repeats."""
    return planner.plan(contexts, masked).arms if planner.repeats else greedy_slates(planner, contexts, masked)


# ── optimism: arms of which little is known get a bonus; nothing but ties is left to chance ───────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Ucbbp(Policy):
    """UCB with backward planning (Algorithm 1): argmax_k Q̂_h(k) + bonus at every position.

    Without repeats the best slate under the optimistic probabilities of the bonus.

    Examples
    --------
    >>> from worker.bandit.additive import AdditiveModel
    >>> planner = Planner(AdditiveModel.prior(dim=1, arms=2, ridge=1.0), [1.0, 2.0], horizon=2)
    >>> Ucbbp(beta=1.0).slates(planner, np.zeros((1, 1))).arms
    array([[1, 1]])
    """

    name: ClassVar[str] = "ucbbp"
    has_bonus: ClassVar[tuple[bool, bool]] = (True, False)

    beta: float
    bonus: Bonus = CURVE
    spread: float = 0.0

    def plan(self, planner: Planner, sessions: Unplanned) -> Slates:
        if planner.repeats:
            return Slates.certain(self.both(planner, sessions)[1], True)
        return Slates.certain(
            optimistic_slates(planner, sessions.contexts, self._optimism(sessions), sessions.masked), True
        )

    def both(self, planner: Planner, sessions: Unplanned) -> tuple[Ints, Ints]:
        """Return the greedy and the optimistic arms: (n, H) each."""
        contexts, masked, optimism = sessions.contexts, sessions.masked, self._optimism(sessions)
        if planner.repeats:
            plan = planner.plan(contexts, masked, optimism)
            return plan.arms, plan.optimistic
        return both_slates(planner, contexts, optimism, masked)

    def _optimism(self, sessions: Unplanned) -> Optimism:
        keys = sessions.keys if self.spread else None
        spread = None if keys is None else Spread(share=self.spread, keys=keys)
        return Optimism(beta=self.beta, bonus=self.bonus, spread=spread)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aucbbp(Policy):
    """Active UCBBP (Algorithm 2): the optimistic arm only where it is worth the most, the greedy one elsewhere.

    A session explores at step h if its score zᵀA⁻¹z, at its optimistic arm, is among the `budget` highest of the batch,
    or on a stream, where no batch is ever whole, above `thresholds[h]` (docs/math.md §5). Of the sessions with that
    very score, as where contexts are few, the share `ties[h]` explores, all by default. Without repeats a session
    explores as a whole, by its first position.
    """

    name: ClassVar[str] = "aucbbp"
    has_bonus: ClassVar[tuple[bool, bool]] = (True, False)
    is_selective: ClassVar[bool] = True

    beta: float
    bonus: Bonus = CURVE
    spread: float = 0.0
    budget: int | None = None
    thresholds: tuple[float, ...] | None = None
    ties: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.thresholds is None):
            raise InputError("aucbbp needs either a budget (a batch) or thresholds (a stream)")

    @property
    def needs_chance(self) -> bool:
        """Whether some ties explore and some do not."""
        return self.ties is not None and any(share < 1 for share in self.ties)

    def plan(self, planner: Planner, sessions: Unplanned) -> Slates:
        greedy, exploring = Ucbbp(beta=self.beta, bonus=self.bonus, spread=self.spread).both(planner, sessions)
        scores = exploration_scores(planner, sessions.contexts, exploring)
        # Without repeats two slates cannot be mixed: the first position decides for all.
        chosen = self._chosen(scores if planner.repeats else scores[:, :1], sessions)
        return Slates.certain(np.where(chosen, exploring, greedy), chosen)

    def _chosen(self, scores: Floats, sessions: Unplanned) -> NDArray[np.bool_]:
        if self.thresholds is not None:
            steps = scores.shape[1]
            thresholds = np.array(self.thresholds[:steps])
            if not self.needs_chance:
                return np.asarray(scores >= thresholds)
            drawn = sessions.chance[:, :steps, 0] < np.array((self.ties or ())[:steps])
            return np.asarray((scores > thresholds) | ((scores == thresholds) & drawn))
        chosen = np.zeros(scores.shape, dtype=bool)
        highest = np.argsort(-scores, axis=0, kind="stable")[: self.budget]
        np.put_along_axis(chosen, highest, True, axis=0)
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class MyopicUcb(Policy):
    """An upper confidence bound without planning: each position as if it were the last."""

    name: ClassVar[str] = "myopic-ucb"
    has_bonus: ClassVar[tuple[bool, bool]] = (True, True)

    beta: float
    bonus: Bonus = CURVE

    def plan(self, planner: Planner, sessions: Unplanned) -> Slates:
        contexts, masked = sessions.contexts, sessions.masked
        optimism = Optimism(beta=self.beta, bonus=self.bonus)
        slates = np.empty((len(contexts), 0), dtype=np.intp)
        for _ in range(1 if planner.repeats else planner.horizon):
            arms = planner.plan(contexts, masked, optimism, steps=1).optimistic
            slates = np.hstack([slates, arms])
            masked = _without(planner, masked, arms)
        return Slates.certain(np.repeat(slates, planner.horizon, axis=1) if planner.repeats else slates, True)


def exploration_scores(planner: Planner, contexts: Floats, arms: Ints) -> Floats:
    """Return zᵀA⁻¹z of the arms of slates, 0 where there is none: (n, H) → (n, H), float64, row by row."""
    scores = planner.model.squared_widths_of(contexts, arms)
    scores[arms == NO_ARM] = 0.0
    return scores


def _without(planner: Planner, masked: Masked | None, shown: Ints) -> Masked:
    """Return the exclusions plus what is shown now: (n, h)."""
    pairs = np.argwhere(shown != NO_ARM)
    columns = np.searchsorted(planner.shown, shown[pairs[:, 0], pairs[:, 1]])
    rows = pairs[:, 0] if masked is None else np.concatenate([masked.rows, pairs[:, 0]])
    columns = columns if masked is None else np.concatenate([masked.columns, columns])
    order = np.argsort(rows, kind="stable")
    return Masked(rows[order], columns[order])


# ── chance, with the probability of every choice ──────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class EpsilonGreedy(Policy):
    """The greedy arm, or with probability ε at each position any eligible arm."""

    name: ClassVar[str] = "epsilon-greedy"
    draws: ClassVar[bool] = True

    epsilon: float = 0.1

    def plan(self, planner: Planner, sessions: Unplanned) -> Slates:
        coins, masked = sessions.chance, sessions.masked
        best = greedy_arms(planner, sessions.contexts, masked)
        if not planner.repeats:
            return _epsilon_without_repeats(planner, best, coins, masked, self.epsilon)
        anything = random_slates(planner, len(best), coins[:, :, 1], masked)
        explored = (coins[:, :, 0] < self.epsilon) & (best != NO_ARM)
        arms = np.where(explored, anything.arms, best)
        share = self.epsilon * anything.propensities
        return Slates(
            arms=arms, explored=explored, propensities=np.where(arms == best, 1 - self.epsilon + share, share)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Random(Policy):
    """Any eligible arm, each with the same probability."""

    name: ClassVar[str] = "random"
    draws: ClassVar[bool] = True
    uses_model: ClassVar[bool] = False

    def plan(self, planner: Planner, sessions: Unplanned) -> Slates:
        return random_slates(planner, len(sessions.contexts), sessions.chance[:, :, 1], sessions.masked)


def random_slates(planner: Planner, count: int, uniforms: Floats, masked: Masked | None) -> Slates:
    """Draw arms uniformly from the eligible: uniforms (n, H) → slates."""
    taken = _taken(planner, count, masked)
    arms = np.full((count, planner.horizon), NO_ARM, dtype=np.intp)
    propensities = np.ones((count, planner.horizon))
    for h in range(planner.horizon):
        left = len(planner.shown) - (taken < len(planner.shown)).sum(axis=1)
        possible = left > 0
        column = np.minimum((uniforms[:, h] * left).astype(np.intp), np.maximum(left - 1, 0))
        # The j-th eligible column: step over every taken column at or before it. `taken` is sorted.
        for gone in taken.T:
            column += gone <= column
        arms[possible, h] = planner.shown[column[possible]]
        propensities[possible, h] = 1 / left[possible]
        if not planner.repeats:
            now = np.where(possible, column, len(planner.shown))[:, None]
            taken = np.sort(np.hstack([taken, now]), axis=1)
    return Slates(arms=arms, explored=arms != NO_ARM, propensities=propensities)


def _taken(planner: Planner, count: int, masked: Masked | None) -> Ints:
    """Return the distinct excluded columns of each row, sorted, filled up with an impossible one: (n, m)."""
    if masked is None:
        return np.empty((count, 0), dtype=np.intp)
    pairs = np.unique(np.stack([masked.rows, masked.columns], axis=1), axis=0)
    sizes = np.bincount(pairs[:, 0], minlength=count)
    taken = np.full((count, int(sizes.max(initial=0))), len(planner.shown), dtype=np.intp)
    within = np.arange(len(pairs)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    taken[pairs[:, 0], within] = pairs[:, 1]
    return taken


def _epsilon_without_repeats(
    planner: Planner, best: Ints, coins: Floats, masked: Masked | None, epsilon: float
) -> Slates:
    """Go through the positions: the next arm of the greedy slate not shown yet, or any eligible arm."""
    arms = np.full(best.shape, NO_ARM, dtype=np.intp)
    explored = np.zeros(best.shape, dtype=bool)
    propensities = np.ones(best.shape)
    taken = _taken(planner, len(best), masked)
    for row in range(len(best)):
        gone = set(taken[row].tolist())
        eligible = [arm for column, arm in enumerate(planner.shown.tolist()) if column not in gone]
        plan = [arm for arm in best[row].tolist() if arm != NO_ARM]
        for h in range(planner.horizon):
            if not plan or not eligible:
                break
            explored[row, h] = coins[row, h, 0] < epsilon
            greedy = plan[0]
            arm = eligible[int(coins[row, h, 1] * len(eligible))] if explored[row, h] else greedy
            propensities[row, h] = epsilon / len(eligible) + (1 - epsilon if arm == greedy else 0)
            arms[row, h] = arm
            eligible.remove(arm)
            # Another arm replaces one of the plan: drop that arm if planned, else the plan's last, least needed one.
            plan.remove(arm if arm in plan else plan[-1])
    return Slates(arms=arms, explored=explored, propensities=propensities)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed(Policy):
    """The same order of arms for everybody: its first eligible arms, each once. It never explores.

    `order` has indices of arms; the others follow by their index.

    >>> from worker.bandit.additive import AdditiveModel
    >>> planner = Planner(AdditiveModel.prior(dim=1, arms=4, ridge=1.0), [1.0] * 4, horizon=3)
    >>> Fixed(order=(2,)).slates(planner, np.zeros((2, 1)), planner.masked([[], [0]])).arms
    array([[2, 0, 1],
           [2, 1, 3]])
    """

    name: ClassVar[str] = "fixed"
    uses_model: ClassVar[bool] = False

    order: tuple[int, ...] = ()

    def plan(self, planner: Planner, sessions: Unplanned) -> Slates:
        return Slates.certain(fixed_slates(planner, len(sessions.contexts), self.order, sessions.masked), False)


# ── the warm-up of an experiment ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin(Policy):
    """The warm-up of an experiment (Algorithm 1): one active arm after the other, position by position.

    At each position the turns go over the users who are still there. `stays` says who is there: slates so far, (n, h) →
    (n,); everybody by default. Users who are gone see nothing of the rest of their slate, and take no turn. Without
    repeats nobody's turn is left out, so that nobody sees an arm twice.
    """

    name: ClassVar[str] = "round-robin"

    start: int = 0
    stays: Callable[[Ints], NDArray[np.bool_]] | None = None

    def plan(self, planner: Planner, sessions: Unplanned) -> Slates:
        if sessions.masked is not None:
            raise InputError("round-robin serves experiments, which exclude no arms")
        count, horizon, known = len(sessions.contexts), planner.horizon, len(planner.shown)
        arms = np.full((count, horizon), NO_ARM, dtype=np.intp)
        turn = self.start
        for h in range(horizon if planner.repeats else min(horizon, known)):
            there = np.ones(count, dtype=bool) if self.stays is None or h == 0 else self.stays(arms[:, :h])
            if not known:
                break
            if not planner.repeats:
                arms[:, h] = planner.shown[(self.start + h + np.arange(count)) % known]
                continue
            rest, gone = np.flatnonzero(there), np.flatnonzero(~there)
            arms[rest, h] = planner.shown[(turn + np.arange(len(rest))) % known]
            arms[gone, h] = planner.shown[(self.start + h + gone) % known]
            turn += len(rest)
        return Slates.certain(arms, arms != NO_ARM)


# ── by name ───────────────────────────────────────────────────────────────────────────────────────────────────────────


POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy for policy in (Ucbbp, Aucbbp, Greedy, EpsilonGreedy, MyopicUcb, Random, Fixed)
}


def check_combination(*, policy: str, bonus: str, repeats: bool) -> None:
    """Raise `InputError` if these settings contradict each other."""
    has_bonus = POLICIES[policy].has_bonus
    if isinstance(BONUSES[bonus], PaperBonus) and has_bonus[0] and not has_bonus[0 if repeats else 1]:
        raise InputError(
            f"bonus {bonus} needs --repeats: without repeats {policy} explores by optimistic probabilities"
        )
