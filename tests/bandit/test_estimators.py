"""The estimators, compared with dense algebra in extended precision, and their errors on unusable data."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit import estimators
from worker.bandit.additive import AdditiveModel
from worker.bandit.click_model import Observations
from worker.bandit.estimators import ESTIMATORS, LARGEST_STEP
from worker.errors import EstimationError

from .beliefs import belief, contexts_of, displays, episode, kinds, lawful, ridges, seeds, seen, update
from .reference import all_features, dense_matrix, dense_theta, inverse, logistic, map_estimate

Floats = NDArray[np.float64]

shapes = st.tuples(st.integers(1, 4), st.integers(1, 5))


def case(seed: int, shape: tuple[int, int], ridge: float = 1.0) -> tuple[AdditiveModel, Observations]:
    """Return a belief that has learned something and an episode of users who behave otherwise."""
    generator = np.random.default_rng(seed)
    dim, arms = shape
    prior = belief(dim, arms, generator, displayed=20, ridge=ridge)
    data = episode(belief(dim, arms, generator), generator.normal(size=(8, dim)), 30, generator)
    return prior, data


# ── laplace ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(seeds, shapes, st.sampled_from([0.05, 1.0, 100.0]))
@lawful
def test_laplace_finds_the_maximum_of_the_posterior(seed: int, shape: tuple[int, int], ridge: float) -> None:
    prior, data = case(seed, shape, ridge)
    with patch.object(estimators, "MOST_STEPS", 10):
        fit = update(prior, data)
    theta, matrix = map_estimate(prior, data)
    np.testing.assert_allclose(dense_theta(fit.model), theta.astype(float), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(dense_matrix(fit.model.precision), matrix.astype(float), rtol=1e-9, atol=1e-11)


# ── newton and paper ─────────────────────────────────────────────────────────────────────────────────────────────────


@given(seeds, shapes)
@example(164499399, (3, 1))  # a step that the gate would refuse
@lawful
def test_newton_is_one_dense_step(seed: int, shape: tuple[int, int]) -> None:
    prior, data = case(seed, shape)
    z = all_features(data, prior.arms).astype(np.longdouble)
    chances = logistic(z @ dense_theta(prior))
    matrix = dense_matrix(prior.precision) + (z.T * (chances * (1 - chances))) @ z
    theta = dense_theta(prior) + inverse(matrix) @ (z.T @ (data.clicked - chances))
    with pytest.MonkeyPatch.context() as patch:
        # A single step from a bad estimate may go too far; the gate that refuses it has tests of its own.
        patch.setattr("worker.bandit.estimators.LARGEST_STEP", np.inf)
        fit = update(prior, data, estimator="newton")
    np.testing.assert_allclose(dense_theta(fit.model), theta.astype(float), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(dense_matrix(fit.model.precision), matrix.astype(float), rtol=1e-12, atol=1e-13)


@given(seeds, shapes, st.integers(1, 4))
@lawful
def test_paper_is_algorithm_1_to_the_letter_over_several_episodes(seed, shape, count) -> None:
    # Algorithm 1 keeps b; the code uses A θ̂, which is the same as long as θ̂ = A⁻¹ b.
    generator = np.random.default_rng(seed)
    dim, arms = shape
    truth, known = belief(dim, arms, generator), AdditiveModel.prior(dim=dim, arms=arms, ridge=1.0)
    matrix = np.eye(dim + arms, dtype=np.longdouble)
    b = theta = np.zeros(dim + arms, dtype=np.longdouble)
    for _ in range(count):
        data = episode(truth, generator.normal(size=(6, dim)), 15, generator)
        for z, y in zip(all_features(data, arms), data.clicked, strict=True):
            p = logistic(z @ theta)
            matrix = matrix + p * (1 - p) * np.outer(z, z)
            b = b + z * (y - p)
        theta = inverse(matrix) @ b
        known = update(known, data, estimator="paper").model
        np.testing.assert_allclose(dense_theta(known), theta.astype(float), rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(dense_matrix(known.precision), matrix.astype(float), rtol=1e-11, atol=1e-12)


def test_the_paper_s_update_stays_short_of_the_truth_where_laplace_arrives() -> None:
    # Erratum 1: its fixed point is about θ*/2.
    generator = np.random.default_rng(9)
    truth = belief(3, 4, generator)
    projections = {}
    for estimator in ("paper", "laplace"):
        known = AdditiveModel.prior(dim=3, arms=4, ridge=1.0)
        for _ in range(40):
            data = episode(truth, generator.normal(size=(100, 3)), 200, generator)
            known = update(known, data, estimator=estimator).model
        projections[estimator] = dense_theta(known) @ dense_theta(truth) / (dense_theta(truth) @ dense_theta(truth))
    assert 0.2 < projections["paper"] < 0.7
    assert 0.9 < projections["laplace"] < 1.1


# ── laws of all ──────────────────────────────────────────────────────────────────────────────────────────────────────


# ── a model that is never corrupt ────────────────────────────────────────────────────────────────────────────────────


def check_usable(posterior: AdditiveModel, before: AdditiveModel, data: Observations) -> None:
    assert np.isfinite(dense_theta(posterior)).all()
    assert np.isfinite(dense_matrix(posterior.precision)).all()
    assert posterior.precision.is_positive_definite
    then, now = (all_features(data, before.arms) @ dense_theta(model) for model in (before, posterior))
    assert np.minimum(np.abs(now - then), np.abs(now)).max() <= LARGEST_STEP + 1e-6 * np.abs(then).max()
    values = np.linalg.eigvalsh(dense_matrix(posterior.precision))
    assert values[0] > -1e-12 * values[-1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(seeds, shapes, kinds, ridges, st.sampled_from(["model", "always", "never", "separable"]))
@lawful
def test_an_update_is_usable_or_it_is_an_error(estimator, seed, shape, kind, ridge, answers) -> None:
    generator = np.random.default_rng(seed)
    dim, arms = shape
    known = AdditiveModel.prior(dim=dim, arms=arms, ridge=ridge)
    for _ in range(4):
        contexts = contexts_of(kind, 10, dim, generator)
        sessions, shown = displays(contexts, arms, 25, generator)
        clicked = {
            "model": generator.random(25) < 0.3,
            "always": np.ones(25),
            "never": np.zeros(25),
            "separable": contexts[sessions, 0] > contexts[:, 0].mean(),
        }[answers]
        data = seen(contexts, sessions, shown, clicked)
        try:
            fit = update(known, data, estimator=estimator)
        except EstimationError:
            continue
        check_usable(fit.model, known, data)
        known = fit.model


@given(seeds, shapes, kinds, st.sampled_from([0.5, 1.0, 10.0]))
@lawful
def test_laplace_converges_on_any_contexts_under_an_ordinary_ridge(seed, shape, kind, ridge) -> None:
    # If users answer by a model of moderate log-odds, no fold may fail, for contexts of any kind.
    generator = np.random.default_rng(seed)
    dim, arms = shape
    known = AdditiveModel.prior(dim=dim, arms=arms, ridge=ridge)
    scale = np.abs(contexts_of(kind, 50, dim, np.random.default_rng(seed))).max()
    truth = AdditiveModel(
        theta_context=generator.normal(size=dim) / (scale * dim),
        theta_arms=generator.normal(size=arms),
        precision=known.precision,
        prior_precision=known.prior_precision,
    )
    for _ in range(5):
        data = episode(truth, contexts_of(kind, 40, dim, generator), 120, generator)
        after = update(known, data).model
        check_usable(after, known, data)
        known = after


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("context", "clicked", "message"),
    [
        ([np.nan, 0.0], 0.0, None),
        ([np.inf, 0.0], 0.0, None),
        ([1e200, -1e200], 0.0, None),
        ([1e308, 1e308], 0.0, None),
        ([1.0, 1.0], np.nan, "not finite"),
    ],
)
def test_numbers_that_no_model_can_take_are_an_error(estimator, context, clicked, message) -> None:
    prior = AdditiveModel.prior(dim=2, arms=2, ridge=1.0)
    with pytest.raises(EstimationError, match=message):
        update(prior, seen(np.array([context]), [0, 0], [0, 1], [1, clicked]), estimator=estimator)


def test_an_estimate_that_moves_too_far_in_one_fold_is_an_error() -> None:
    # Almost no prior and answers that a line separates: the maximum lies very far out.
    prior = AdditiveModel.prior(dim=1, arms=1, ridge=1e-14)
    data = seen(np.array([[1.0], [-1.0]]), [0, 1], [0, 0], [1, 0])
    with pytest.raises(EstimationError, match=r"moved by .* in one fold, more than 20"):
        update(prior, data)


def test_a_fit_that_takes_too_many_steps_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    prior, data = case(2, (2, 3))
    monkeypatch.setattr(estimators, "MOST_STEPS", 1)
    with pytest.raises(EstimationError, match="did not converge in 1 steps"):
        update(prior, data)
