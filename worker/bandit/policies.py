"""Which slate each session gets, and which positions explored.

Every policy is a small value with one verb, `slates(planner, contexts, …)`. Chance enters as an argument: `uniforms`
(n, H, 2) in [0, 1), from a generator in an experiment, from a stable hash of the session on a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from worker.bandit.ordering import greedy_slates, optimistic_slates
from worker.bandit.planning import NO_ARM, Masked, Planner
from worker.bandit.precision import Floats, Ints
from worker.errors import InputError

POLICIES = ("ucbbp", "aucbbp", "greedy", "epsilon-greedy", "myopic-ucb", "random")
BONUSES = ("value", "paper")


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


class Policy(Protocol):
    """A rule that gives each session its slate."""

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        """Plan contexts (n, d)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """Always the best slate under the estimate; never explores, and so may get stuck."""

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        """Plan contexts (n, d)."""
        return Slates.certain(greedy_arms(planner, contexts, masked), False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ucbbp:
    """UCB with backward planning (Algorithm 1): argmax_k Q̂_h(k) + bonus at every position.

    Examples
    --------
    >>> from worker.bandit.model import Posterior
    >>> planner = Planner(Posterior.prior(dim=1, arms=2, ridge=1.0), [1.0, 2.0], horizon=2)
    >>> Ucbbp(beta=1.0).slates(planner, np.zeros((1, 1))).arms
    array([[1, 1]])
    """

    beta: float
    bonus: str = "value"

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        """Plan contexts (n, d)."""
        if not planner.repeats:
            return Slates.certain(optimistic_slates(planner, contexts, beta=self.beta, masked=masked), True)
        plan = planner.greedy(contexts, masked)
        arms = planner.optimistic(contexts, plan.continuations, beta=self.beta, bonus=self.bonus, masked=masked)
        return Slates.certain(arms, True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aucbbp:
    """Active UCBBP (Algorithm 2): the optimistic arm only where it is worth the most, the greedy one elsewhere.

    A session explores at step h if its score zᵀA⁻¹z, at its optimistic arm, is among the `budget` highest of the batch,
    or, on a stream where nobody sees the whole batch, at least `thresholds[h]` (math.md §5). Without repeats a session
    explores as a whole, by its first position.
    """

    beta: float
    bonus: str = "value"
    budget: int | None = None
    thresholds: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.thresholds is None):
            raise InputError("aucbbp needs either a budget (a batch) or thresholds (a stream)")

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        """Plan contexts (n, d)."""
        if self.thresholds is not None and len(self.thresholds) != planner.horizon:
            raise InputError(f"{len(self.thresholds)} thresholds for a horizon of {planner.horizon}")
        exploring = Ucbbp(beta=self.beta, bonus=self.bonus).slates(planner, contexts, masked).arms
        scores = exploration_scores(planner, contexts, exploring)
        # Without repeats two slates cannot be mixed: the first position decides for all.
        chosen = self._chosen(scores if planner.repeats else scores[:, :1])
        return Slates.certain(np.where(chosen, exploring, greedy_arms(planner, contexts, masked)), chosen)

    def _chosen(self, scores: Floats) -> NDArray[np.bool_]:
        if self.thresholds is not None:
            return np.asarray(scores >= np.asarray(self.thresholds)[: scores.shape[1]])
        chosen = np.zeros(scores.shape, dtype=bool)
        highest = np.argsort(-scores, axis=0, kind="stable")[: self.budget]
        np.put_along_axis(chosen, highest, True, axis=0)
        return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class EpsilonGreedy:
    """The greedy arm, or with probability ε at each position any eligible arm."""

    epsilon: float

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        """Plan contexts (n, d)."""
        coins = _required(uniforms)
        best = greedy_arms(planner, contexts, masked)
        if not planner.repeats:
            return _epsilon_without_repeats(planner, best, coins, masked, self.epsilon)
        anything = random_slates(planner, len(contexts), coins[:, :, 1], masked)
        explored = (coins[:, :, 0] < self.epsilon) & (best != NO_ARM)
        arms = np.where(explored, anything.arms, best)
        share = self.epsilon * anything.propensities
        return Slates(
            arms=arms, explored=explored, propensities=np.where(arms == best, 1 - self.epsilon + share, share)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MyopicUcb:
    """An upper confidence bound without planning: each position as if it were the last."""

    beta: float
    bonus: str = "value"

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        """Plan contexts (n, d)."""
        now = np.zeros((len(contexts), 2), dtype=planner.dtype)
        columns = []
        for _ in range(planner.horizon):
            arms = planner.optimistic(contexts, now, beta=self.beta, bonus=self.bonus, masked=masked)
            columns.append(arms)
            if planner.repeats:
                columns *= planner.horizon
                break
            shown = np.hstack(columns)
            masked = _without(planner, masked, shown)
        return Slates.certain(np.hstack(columns), True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Random:
    """Any eligible arm, each with the same probability."""

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        """Plan contexts (n, d)."""
        return random_slates(planner, len(contexts), _required(uniforms)[:, :, 1], masked)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobin:
    """One active arm after the other, over all displays of a batch: the warm-up of an experiment."""

    start: int = 0

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        """Plan contexts (n, d)."""
        if masked is not None:
            raise InputError("round-robin serves experiments, which exclude no arms")
        shape = (len(contexts), planner.horizon)
        if not len(planner.shown):
            return Slates.certain(np.full(shape, NO_ARM, dtype=np.intp), False)
        turns = (self.start + np.arange(shape[0] * shape[1])).reshape(shape)
        arms = planner.shown[turns % len(planner.shown)]
        if not planner.repeats:
            arms[:, len(planner.shown) :] = NO_ARM
        return Slates.certain(arms, arms != NO_ARM)


def make_policy(
    name: str,
    *,
    beta: float = 2.5,
    bonus: str = "value",
    epsilon: float = 0.1,
    budget: int | None = None,
    thresholds: tuple[float, ...] | None = None,
) -> Policy:
    """Return the policy called `name`; settings that it does not use are ignored."""
    if bonus not in BONUSES:
        raise InputError(f"unknown bonus {bonus!r}; one of {', '.join(BONUSES)}")
    match name:
        case "ucbbp":
            return Ucbbp(beta=beta, bonus=bonus)
        case "aucbbp":
            return Aucbbp(beta=beta, bonus=bonus, budget=budget, thresholds=thresholds)
        case "greedy":
            return Greedy()
        case "epsilon-greedy":
            return EpsilonGreedy(epsilon=epsilon)
        case "myopic-ucb":
            return MyopicUcb(beta=beta, bonus=bonus)
        case "random":
            return Random()
    raise InputError(f"unknown policy {name!r}; one of {', '.join(POLICIES)}")


# ── parts that policies share ────────────────────────────────────────────────────────────────────────────────────────


def greedy_arms(planner: Planner, contexts: Floats, masked: Masked | None) -> Ints:
    """Return the best slates under the estimate, with or without repeats."""
    return planner.greedy(contexts, masked).arms if planner.repeats else greedy_slates(planner, contexts, masked)


def exploration_scores(planner: Planner, contexts: Floats, arms: Ints) -> Floats:
    """Return zᵀA⁻¹z of the arms of slates, 0 where there is none: (n, H) → (n, H), float64, row by row."""
    scores = planner.posterior.precision.squared_widths_of(contexts, arms)
    scores[arms == NO_ARM] = 0.0
    return scores


def random_slates(planner: Planner, count: int, uniforms: Floats, masked: Masked | None) -> Slates:
    """Draw arms uniformly from the eligible: uniforms (n, H) → slates."""
    taken = _taken(planner, count, masked)
    arms = np.full((count, planner.horizon), NO_ARM, dtype=np.intp)
    propensities = np.ones((count, planner.horizon))
    for h in range(planner.horizon):
        left = len(planner.shown) - (taken < len(planner.shown)).sum(axis=1)
        possible = left > 0
        place = np.minimum((uniforms[:, h] * left).astype(np.intp), np.maximum(left - 1, 0))
        # The j-th eligible column: step over every taken column at or before it. `taken` is sorted.
        for gone in taken.T:
            place += gone <= place
        arms[possible, h] = planner.shown[place[possible]]
        propensities[possible, h] = 1 / left[possible]
        if not planner.repeats:
            now = np.where(possible, place, len(planner.shown))[:, None]
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


def _without(planner: Planner, masked: Masked | None, shown: Ints) -> Masked | None:
    """Return the exclusions plus what was shown already: (n, h)."""
    pairs = np.argwhere(shown != NO_ARM)
    columns = np.searchsorted(planner.shown, shown[pairs[:, 0], pairs[:, 1]])
    rows = pairs[:, 0] if masked is None else np.concatenate([masked.rows, pairs[:, 0]])
    columns = columns if masked is None else np.concatenate([masked.columns, columns])
    order = np.argsort(rows, kind="stable")
    return Masked(rows[order], columns[order])


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
            # Another arm takes a place of the plan: drop that arm if planned, else the plan's last, least needed one.
            plan.remove(arm if arm in plan else plan[-1])
    return Slates(arms=arms, explored=explored, propensities=propensities)


def _required(uniforms: Floats | None) -> Floats:
    if uniforms is None:
        raise InputError("this policy draws at random: give it uniforms")
    return uniforms
