"""Regret of sessions, in three measures that must not be mixed up (docs/math.md §6).

- pseudo-regret: against the true model, so in simulations only;
- the optimistic gap: an upper bound at the chosen confidence, from the widths;
- the posterior regret: the expectation over what is still believed possible.

The last two hold if the model is right. Where it is not, they can be a hundredth of the truth.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from worker.bandit.answers import AnswerRates
from worker.bandit.arrays import Floats, Ints, sigmoid
from worker.bandit.click_model import Truth
from worker.bandit.ordering import best_values
from worker.bandit.planning import Planner, optimal_values, slate_values

#: Draws from the posterior that are planned together.
DRAWN_AT_ONCE = 8


def best_revenue(planner: Planner, chances: Floats) -> Floats:
    """Return the revenue of the best slates when the probabilities of the active arms are given: (n, K') → (n,)."""
    rewards = planner.rewards[planner.shown]
    if not len(rewards):
        return np.zeros(len(chances))
    if not planner.repeats:
        return best_values(chances, rewards, planner.horizon, planner.cascade)
    return optimal_values(chances, rewards, planner.horizon, planner.cascade)[:, 0]


def slate_revenue(
    model: Truth, rewards: Floats, contexts: Floats, arms: Ints, answers: AnswerRates | None = None
) -> Floats:
    """Return the expected revenue of slates under a model: arms (n, H) → (n,)."""
    return slate_values(model, rewards, contexts, arms, answers)[:, 0]


def pseudo_regret(planner: Planner, truth: Truth, contexts: Floats, arms: Ints) -> Floats:
    """Return V^{π*} − V^{π} of slates under the true model: (n, H) → (n,)."""
    best = best_revenue(planner, sigmoid(truth.log_odds(contexts)[:, planner.shown]))
    return best - slate_revenue(truth, planner.rewards, contexts, arms, planner.answers)


def optimistic_gap(planner: Planner, contexts: Floats, arms: Ints, *, beta: float) -> Floats:
    """Return V^{ucb} − V̂^{π}: what slates may miss if all arms were β standard deviations better: (n, H) → (n,)."""
    odds = planner.model.log_odds(contexts) + beta * planner.model.widths(contexts)
    best = best_revenue(planner, sigmoid(odds)[:, planner.shown])
    return best - slate_revenue(planner.model, planner.rewards, contexts, arms, planner.answers)


def posterior_regret(
    planner: Planner, contexts: Floats, arms: Ints, *, generator: np.random.Generator, draws: int = 32
) -> Floats:
    """Return the expectation over N(θ̂, A⁻¹) of V*(θ) − V^{π}(θ), by `draws` draws from the posterior: (n, H) → (n,)."""
    total = np.zeros(len(contexts))
    drawn = planner.model.draws(generator, draws)
    while some := list(islice(drawn, DRAWN_AT_ONCE)):
        # Planned together: the programme has a step for every arm, whatever the number of rows.
        chances = np.concatenate([sigmoid(one.log_odds(contexts)[:, planner.shown]) for one in some])
        for one, best in zip(some, best_revenue(planner, chances).reshape(len(some), -1), strict=True):
            total += best - slate_revenue(one, planner.rewards, contexts, arms, planner.answers)
    return total / draws
