"""Three measures of regret, each compared with its definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import NO_ARM
from worker.bandit.personal import PersonalModel
from worker.bandit.planning import Planner
from worker.bandit.policies import Greedy, Random
from worker.bandit.regret import best_revenue, optimistic_gap, posterior_regret

from .beliefs import belief, lawful, probabilities, pseudo_regret, seeds
from .reference import best_value, logistic, slate_value, squared_widths

Slate = NDArray[np.intp]


def scene(seed: int, arms: int, horizon: int, repeats: bool) -> tuple[Planner, NDArray[np.float64], Slate]:
    """Return a planner with one arm retired where there are several, contexts, and slates of any arms."""
    generator = np.random.default_rng(seed)
    active = np.ones(arms, dtype=bool)
    active[generator.integers(arms)] = arms == 1
    rewards = generator.uniform(0.1, 1, arms)
    planner = Planner(belief(2, arms, generator), rewards, horizon=horizon, active=active, repeats=repeats)
    contexts = generator.normal(size=(4, 2))
    slates = Random().slates(planner, contexts, None, generator.random((4, horizon, 2))).arms
    slates[0, generator.integers(horizon) :] = NO_ARM
    return planner, contexts, slates


def best(planner: Planner, chances: NDArray[np.float64]) -> float:
    return best_value(chances, planner.rewards, planner.horizon, planner.shown.tolist(), repeats=planner.repeats)


scenes_of = (seeds, st.integers(1, 5), st.integers(1, 3), st.booleans())


@given(*scenes_of)
@lawful
def test_pseudo_regret_is_the_lead_of_the_best_slate(seed, arms, horizon, repeats) -> None:
    planner, contexts, slates = scene(seed, arms, horizon, repeats)
    truth = belief(2, arms, np.random.default_rng(seed + 1))
    losses = pseudo_regret(planner, truth, contexts, slates)
    for row, chances in enumerate(probabilities(truth, contexts)):
        shown = slates[row][slates[row] != NO_ARM]
        expected = best(planner, chances) - slate_value(chances, planner.rewards, shown)
        assert losses[row] == pytest.approx(expected, abs=1e-12)
        assert losses[row] >= -1e-12


@given(*scenes_of, st.sampled_from([0.0, 0.5, 2.0, 100.0]))
@lawful
def test_the_optimistic_gap_is_its_definition_and_never_negative(seed, arms, horizon, repeats, beta) -> None:
    planner, contexts, slates = scene(seed, arms, horizon, repeats)
    gaps = optimistic_gap(planner, contexts, slates, beta=beta)
    known = planner.model
    widths = np.sqrt(squared_widths(known.precision, contexts))
    hopeful = np.asarray(logistic(known.log_odds(contexts) + beta * widths), dtype=float)
    for row, chances in enumerate(probabilities(known, contexts)):
        shown = slates[row][slates[row] != NO_ARM]
        expected = best(planner, hopeful[row]) - slate_value(chances, planner.rewards, shown)
        assert gaps[row] == pytest.approx(expected, abs=1e-11)
        assert gaps[row] >= -1e-12


@given(*scenes_of)
@lawful
def test_posterior_regret_is_the_average_over_its_draws_and_never_negative(seed, arms, horizon, repeats) -> None:
    planner, contexts, slates = scene(seed, arms, horizon, repeats)
    losses = posterior_regret(planner, contexts, slates, generator=np.random.default_rng(seed), draws=5)
    expected = np.zeros(len(contexts))
    for drawn in planner.model.draws(np.random.default_rng(seed), 5):
        expected += pseudo_regret(planner, drawn, contexts, slates) / 5
    np.testing.assert_allclose(losses, expected, atol=1e-12)
    assert (losses >= -1e-12).all()


@pytest.mark.parametrize("repeats", [True, False])
def test_without_an_active_arm_nothing_can_be_lost(repeats: bool) -> None:
    planner = Planner(
        AdditiveModel.prior(dim=1, arms=2, ridge=1.0),
        [1.0, 2.0],
        horizon=2,
        active=np.zeros(2, dtype=bool),
        repeats=repeats,
    )
    contexts, nothing = np.ones((3, 1)), np.full((3, 2), NO_ARM)
    assert best_revenue(planner, np.zeros((3, 0))).tolist() == [0.0] * 3
    assert planner.slate_values(contexts, nothing)[:, 0].tolist() == [0.0] * 3
    assert optimistic_gap(planner, contexts, nothing, beta=2.0).tolist() == [0.0] * 3
    assert posterior_regret(planner, contexts, nothing, generator=np.random.default_rng(0)).tolist() == [0.0] * 3


def test_the_best_slate_has_the_position_effects_of_the_model_that_judges_it() -> None:
    generator = np.random.default_rng(3)
    prior = PersonalModel.prior(dim=2, arms=4, ridge=1.0, horizon=3)
    truth = replace(prior, own=generator.normal(size=(4, 3)), positions=np.array([-1.0, 2.0]))
    believed = Planner(replace(prior, positions=np.array([2.0, -1.0])), [1.0, 0.7, 0.4, 0.9], horizon=3)
    contexts = generator.normal(size=(20, 2))
    right = Greedy().slates(Planner(truth, believed.rewards, horizon=3, dtype=np.float64), contexts).arms
    wrong = Greedy().slates(believed, contexts).arms
    np.testing.assert_allclose(pseudo_regret(believed, truth, contexts, right), 0, atol=1e-12)
    assert (pseudo_regret(believed, truth, contexts, wrong) >= -1e-12).all()
    assert (posterior_regret(believed, contexts, wrong, generator=generator, draws=8) >= -1e-12).all()
