"""The claims of the paper about its algorithms, and of docs/math.md about the paper, on few seeds."""

from functools import cache

import numpy as np
import pytest

from worker.simulation.experiment.run import run_task
from worker.simulation.experiment.settings import ExperimentSettings, ExperimentTask

SEEDS = range(200, 204)
EPISODES = 150


@cache
def regrets(policy, users=50, environment="uniform", **changes):
    """Regret per episode, (seeds, T)."""
    settings = ExperimentSettings(episodes=EPISODES, environment=environment, **changes)
    return np.array(
        [run_task(settings, ExperimentTask(policy=policy, users=users, seed=seed)).regret for seed in SEEDS]
    )


def time_averaged(curves):
    return (np.cumsum(curves, axis=1) / np.arange(1, EPISODES + 1)).mean(axis=0)


def context_averaged(policy, environment):
    return [regrets(policy, users, environment).sum(axis=1).mean() / users for users in (10, 50, 200)]


@pytest.mark.parametrize("policy", ["ucbbp", "aucbbp"])
def test_time_averaged_regret_falls_towards_zero(policy):
    curve = time_averaged(regrets(policy))
    assert curve[9] > 2 * curve[39] > 4 * curve[-1]
    assert regrets(policy)[:, -50:].mean() < 0.02 * regrets(policy)[:, :2].mean()


@pytest.mark.parametrize("policy", ["ucbbp", "aucbbp"])
def test_context_averaged_regret_falls_with_the_number_of_users(policy):
    few, some, many = context_averaged(policy, "opposite")
    assert few > 1.5 * some
    assert some > 1.5 * many


def test_context_averaged_regret_of_epsilon_greedy_does_not_fall():
    few, some, many = context_averaged("epsilon-greedy", "uniform")
    assert few < 1.25 * some < 1.5 * many


def test_epsilon_greedy_reaches_a_plateau():
    early, late = regrets("epsilon-greedy")[:, 50:100].mean(), regrets("epsilon-greedy")[:, 100:].mean()
    assert late > 0.7 * early
    assert late > 3 * regrets("ucbbp")[:, 100:].mean()


def test_the_update_as_printed_is_biased_and_its_regret_never_ends():
    printed, right = (regrets("ucbbp", environment="opposite", estimator=name) for name in ("paper", "laplace"))
    assert printed.sum(axis=1).mean() > 3 * right.sum(axis=1).mean()
    assert printed[:, -50:].mean() > 5 * right[:, -50:].mean()


def test_with_the_radius_of_the_theorem_exploration_never_ends():
    wide, tuned = regrets("ucbbp", beta="theory", bonus="paper"), regrets("ucbbp")
    assert wide[:, -50:].mean() > 0.7 * wide[:, 50:100].mean()
    assert wide[:, -50:].mean() > 10 * tuned[:, -50:].mean()


def test_the_estimate_of_the_printed_update_is_shrunk():
    task = ExperimentTask(policy="ucbbp", users=50, seed=200)
    printed, right = (
        run_task(ExperimentSettings(episodes=EPISODES, estimator=name), task) for name in ("paper", "laplace")
    )
    assert printed.projection < 0.75 < 0.9 < right.projection
    assert printed.log_odds_error > 10 * right.log_odds_error
