"""What a session may have lost, as far as it can be told (math.md §6).

Three different things, never to be mixed up:

- pseudo-regret: against the true model, so in simulations only;
- the optimistic gap: an upper bound at the chosen confidence, from the widths;
- the posterior regret: the expectation over what is still believed possible.
"""

from __future__ import annotations

import numpy as np

from worker.bandit.model import Posterior, sigmoid
from worker.bandit.ordering import best_values
from worker.bandit.planning import NO_ARM, Planner, optimal_values, values_of_slates
from worker.bandit.precision import Floats, Ints


def best_revenue(planner: Planner, chances: Floats) -> Floats:
    """Return the revenue of the best slates when the probabilities of the active arms are given: (n, K') → (n,)."""
    rewards = planner.rewards[planner.shown]
    if not len(rewards):
        return np.zeros(len(chances))
    if planner.repeats:
        return optimal_values(chances, rewards, planner.horizon)[:, 0]
    return best_values(chances, rewards, planner.horizon)


def slate_revenue(theta_context: Floats, theta_arms: Floats, rewards: Floats, contexts: Floats, arms: Ints) -> Floats:
    """Return the expected revenue of slates under a given model: arms (n, H) → (n,)."""
    chances = sigmoid((contexts @ theta_context)[:, None] + theta_arms[arms])
    chances[arms == NO_ARM] = 0.0
    return values_of_slates(chances, rewards[arms])[:, 0]


def pseudo_regret(planner: Planner, truth: Posterior, contexts: Floats, arms: Ints) -> Floats:
    """Return V^{π*} − V^{π} of slates under the true model: (n, H) → (n,)."""
    best = best_revenue(planner, truth.probabilities(contexts)[:, planner.shown])
    return best - slate_revenue(truth.theta_context, truth.theta_arms, planner.rewards, contexts, arms)


def optimistic_gap(planner: Planner, contexts: Floats, arms: Ints, *, beta: float) -> Floats:
    """Return V^{ucb} − V̂^{π}: what slates may miss if all arms were β standard deviations better: (n, H) → (n,)."""
    belief = planner.posterior
    odds = belief.log_odds(contexts) + beta * belief.precision.widths(contexts)
    best = best_revenue(planner, sigmoid(odds)[:, planner.shown])
    return best - slate_revenue(belief.theta_context, belief.theta_arms, planner.rewards, contexts, arms)


def posterior_regret(
    planner: Planner, contexts: Floats, arms: Ints, *, generator: np.random.Generator, draws: int = 32
) -> Floats:
    """Return the expectation over N(θ̂, A⁻¹) of V*(θ) − V^{π}(θ), by `draws` structured draws: (n, H) → (n,)."""
    total = np.zeros(len(contexts))
    for theta_context, theta_arms in zip(*planner.posterior.draws(generator, draws), strict=True):
        chances = sigmoid((contexts @ theta_context)[:, None] + theta_arms[planner.shown])
        best = best_revenue(planner, chances)
        total += best - slate_revenue(theta_context, theta_arms, planner.rewards, contexts, arms)
    return total / draws
