"""The click model and the belief about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import sigmoid
from worker.errors import InputError

from .beliefs import belief, episode, lawful, probabilities, seeds, update
from .reference import dense_matrix, dense_theta, logistic


@given(st.lists(st.floats(-800, 800), min_size=1, max_size=20))
@lawful
def test_the_sigmoid_is_right_to_the_last_digits_at_both_ends(odds: list[float]) -> None:
    u = np.array(odds)
    expected = logistic(u)
    normal = expected > np.finfo(float).tiny  # below, digits are lost by the number range itself
    actual = sigmoid(u)
    assert (np.abs(actual - expected) <= np.where(normal, 1e-15 * expected, 1e-307)).all()
    assert (np.abs((1 - actual) - sigmoid(-u)) <= 1e-15).all()


@pytest.mark.parametrize("u", [-np.inf, -1e308, -750.0, 0.0, 750.0, 1e308, np.inf])
def test_the_sigmoid_has_no_overflow_and_keeps_single_precision(u: float) -> None:
    assert sigmoid(np.array([u])).item() == pytest.approx(0.5 if u == 0 else float(u > 0), abs=1e-300)
    assert sigmoid(np.array([0], dtype=np.float32)).dtype == np.float32


@given(seeds, st.integers(1, 5), st.integers(1, 6))
@lawful
def test_log_odds_and_probabilities_are_those_of_the_joint_feature(seed: int, dim: int, arms: int) -> None:
    generator = np.random.default_rng(seed)
    known = belief(dim, arms, generator)
    contexts = generator.normal(size=(3, dim))
    for row, context in enumerate(contexts):
        for arm in range(arms):
            odds = np.concatenate([context, np.eye(arms)[arm]]) @ dense_theta(known)
            assert known.log_odds(contexts)[row, arm] == pytest.approx(odds, abs=1e-13)
            assert probabilities(known, contexts)[row, arm] == pytest.approx(float(logistic(odds)), abs=1e-14)


def test_a_new_arm_is_as_likely_as_not_for_the_context_at_the_origin() -> None:
    known = belief(2, 3, np.random.default_rng(0))
    grown = known.with_arms(2)
    assert (grown.dim, grown.arms) == (2, 5)
    assert np.array_equal(grown.theta_arms, [*known.theta_arms, 0.0, 0.0])
    assert np.array_equal(grown.theta_context, known.theta_context)
    assert np.array_equal(dense_matrix(grown.precision), dense_matrix(known.precision.with_arms(2, ridge=1.0)))
    assert known.with_arms(0) == known


def test_a_belief_is_a_value() -> None:
    theta = np.zeros(2)
    known = AdditiveModel.certain(theta, np.zeros(3))
    theta[0] = 9.0
    assert known == AdditiveModel.prior(dim=2, arms=3, ridge=1.0)
    assert known != AdditiveModel.prior(dim=2, arms=3, ridge=2.0)
    assert known != replace(known, theta_context=theta)
    assert known != replace(known, theta_arms=np.ones(3))
    assert known != known.precision
    for array in (known.theta_context, known.theta_arms):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize(
    ("context", "arms", "message"),
    [
        ([0.0], [0.0, 0.0, 0.0], "theta_context: shape"),
        ([0.0, 0.0], [0.0, 0.0], "theta_arms: shape"),
        ([0.0, np.nan], [0.0, 0.0, 0.0], "theta_context: has a number that is not finite"),
        ([0.0, 0.0], [0.0, np.inf, 0.0], "theta_arms: has a number that is not finite"),
        ([0.0, 0.0], "abc", "theta_arms: not an array"),
    ],
)
def test_an_estimate_of_the_wrong_shape_or_not_finite_is_refused(context: Any, arms: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(AdditiveModel.prior(dim=2, arms=3, ridge=1.0), theta_context=context, theta_arms=arms)


@pytest.mark.parametrize("intercept", [True, False])
def test_a_packed_belief_comes_back_to_the_bit_and_chosen_arms_keep_their_heads(intercept: bool) -> None:
    generator = np.random.default_rng(3)
    prior = AdditiveModel.prior(dim=2, arms=4, ridge=1.0, intercept=intercept)
    known = update(prior, episode(belief(2, 4, generator), generator.normal(size=(20, 2)), 60, generator)).model
    assert AdditiveModel.unpack(known.pack(), intercept=intercept) == known
    chosen = known.choose_arms([3, 1])
    for place, arm in enumerate([3, 1]):
        for one, other in zip(chosen.head(place), known.head(arm), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    with pytest.raises(InputError, match="not positive definite"):
        AdditiveModel.unpack({**known.pack(), "precision.arms": -known.precision.arms}, intercept=intercept)
