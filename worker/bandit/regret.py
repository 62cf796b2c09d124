"""Regret of sessions, in two measures that must not be mixed up (docs/math.md §6).

- the optimistic gap: an upper bound at the chosen confidence, from the widths;
- the posterior regret: the expectation over what is still believed possible.

Both hold if the model is right. Where it is not, they can be far below the truth. That, the pseudo-regret, is known in
simulations only.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from worker.bandit.arrays import Floats, Ints, sigmoid
from worker.bandit.ordering import best_values
from worker.bandit.planning import Planner, optimal_values, values_of_slates

#: Draws from the posterior that are planned together.
DRAWN_AT_ONCE = 8


def best_revenue(planner: Planner, chances: Floats) -> Floats:
    """Return the revenue of the best slates when the probabilities of the active arms are given: (n, K') → (n,)."""
    rewards, horizon, cascade = planner.rewards[planner.shown], planner.horizon, planner.cascade
    if not len(rewards):
        return np.zeros(len(chances))
    if not planner.repeats:
        return best_values(chances, rewards, horizon, cascade)
    return optimal_values(chances, rewards, horizon, cascade)[:, 0]


def optimistic_gap(planner: Planner, contexts: Floats, arms: Ints, *, beta: float) -> Floats:
    """Return V^{ucb} − V̂^{π}: what slates may miss if all arms were β standard deviations better: (n, H) → (n,)."""
    odds = planner.model.log_odds(contexts) + beta * planner.model.widths(contexts)
    best = best_revenue(planner, sigmoid(odds)[:, planner.shown])
    return best - planner.slate_values(contexts, arms)[:, 0]


def posterior_regret(
    planner: Planner, contexts: Floats, arms: Ints, *, generator: np.random.Generator, draws: int = 32
) -> Floats:
    """Return the expectation over N(θ̂, A⁻¹) of V*(θ) − V^{π}(θ), by `draws` draws from the posterior: (n, H) → (n,).

    Effects of positions, which all arms share, are those of the estimate in both: draws are then planned together.
    """
    total, effects = np.zeros(len(contexts)), planner.model.position_effects
    later = effects[np.minimum(np.arange(arms.shape[1]), len(effects) - 1)]
    rates = None if planner.answers is None else planner.answers.of_slates(arms)
    drawn = planner.model.draws(generator, draws)
    while some := list(islice(drawn, DRAWN_AT_ONCE)):
        # Planned together: the programme has a step for every arm, for any number of rows.
        chances = np.concatenate([sigmoid(one.log_odds(contexts)[:, planner.shown]) for one in some])
        for one, best in zip(some, best_revenue(planner, chances).reshape(len(some), -1), strict=True):
            served = sigmoid(one.log_odds_of(contexts, arms) + later)
            total += best - values_of_slates(served, planner.rewards[arms], rates)[:, 0]
    return total / draws
