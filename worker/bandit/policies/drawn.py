"""Slates that are left to chance, with the probability of every choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from worker.bandit.arrays import NO_ARM, Floats, Ints
from worker.bandit.planning import Masked, Planner
from worker.bandit.policies.greedy import greedy_arms
from worker.bandit.policies.policy import Policy, Slates, required


@dataclass(frozen=True, slots=True, kw_only=True)
class EpsilonGreedy(Policy):
    """The greedy arm, or with probability ε at each position any eligible arm."""

    name: ClassVar[str] = "epsilon-greedy"
    draws: ClassVar[bool] = True

    epsilon: float

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        coins = required(uniforms)
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
class Random(Policy):
    """Any eligible arm, each with the same probability."""

    name: ClassVar[str] = "random"
    draws: ClassVar[bool] = True

    def slates(
        self, planner: Planner, contexts: Floats, masked: Masked | None = None, uniforms: Floats | None = None
    ) -> Slates:
        return random_slates(planner, len(contexts), required(uniforms)[:, :, 1], masked)


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
