"""The personal model, compared with the whole matrix, with finite differences, and with its formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import NO_ARM, sigmoid
from worker.bandit.click_model import Observations, inputs
from worker.bandit.estimators import ESTIMATORS
from worker.bandit.hierarchy import Hierarchy
from worker.bandit.personal import EVIDENCE_STEPS, STRONGEST, WEAKEST, PersonalModel
from worker.errors import EstimationError, InputError

from .beliefs import briefly, lawful, seeds
from .reference import Wide, dense_map, inverse
from .tastes import (
    Tastes,
    answers_to,
    columns,
    covariance_of,
    head_of,
    row_of,
    rows_of,
    taste,
    tastes,
    vector,
    whole_matrix,
)

Floats = NDArray[np.float64]


def as_vector(model: PersonalModel) -> Floats:
    return vector(*model.coefficients)


def case(seed: int, dim: int, arms: int, features: int) -> tuple[PersonalModel, Observations]:
    """Return a belief that has learned something and an episode of users who behave otherwise."""
    generator = np.random.default_rng(seed)
    prior = taste(dim, arms, generator, features=features)
    return prior, answers_to(taste(dim, arms, generator, features=features), 12, 40, generator)


cases = st.builds(case, seeds, st.integers(1, 3), st.integers(1, 4), columns)


# ── predicting ───────────────────────────────────────────────────────────────────────────────────────────────────────


@given(tastes())
@lawful
def test_log_odds_and_widths_are_those_of_the_joint_feature(scene: Tastes) -> None:
    model, contexts = scene.model, scene.generator.normal(size=(3, scene.model.dim))
    covariance = covariance_of(model.precision)
    for row, u in enumerate(inputs(contexts)):
        for arm in range(model.arms):
            z = row_of(model.precision, u, arm)
            assert model.log_odds(contexts)[row, arm] == pytest.approx(z @ as_vector(model), abs=1e-12)
            assert model.widths(contexts)[row, arm] == pytest.approx(float(np.sqrt(z @ covariance @ z)), rel=1e-9)


@given(tastes(), st.integers(0, 4))
@lawful
def test_chosen_pairs_have_the_numbers_of_the_table(scene: Tastes, horizon: int) -> None:
    model, contexts = scene.model, scene.generator.normal(size=(3, scene.model.dim))
    arms = scene.generator.integers(-1, model.arms + 1, (3, horizon))
    odds = model.log_odds_of(contexts, arms)
    nobody = (arms == NO_ARM) | (arms == model.arms)
    assert (odds[nobody] == -np.inf).all()
    table = np.take_along_axis(model.log_odds(contexts), np.where(nobody, 0, arms), axis=1)
    np.testing.assert_allclose(odds[~nobody], table[~nobody], rtol=0, atol=1e-12)
    known = np.where(nobody, 0, arms)
    squares = np.take_along_axis(model.widths(contexts) ** 2, known, axis=1)
    np.testing.assert_allclose(model.squared_widths_of(contexts, known), squares, rtol=1e-10)


@given(tastes())
@lawful
def test_what_people_read_is_the_brute_force_posterior(scene: Tastes) -> None:
    model, covariance = scene.model, covariance_of(scene.precision)
    for arm in range(model.arms):
        through = head_of(model.precision, arm)
        mean, spread = model.head(arm)
        np.testing.assert_allclose(mean, through @ as_vector(model), rtol=0, atol=1e-12)
        np.testing.assert_allclose(spread, (through @ covariance @ through.T).astype(float), rtol=0, atol=1e-9)
        assert model.biases[arm] == mean[0]
        assert model.bias_deviations[arm] == pytest.approx(np.sqrt(spread[0, 0]), rel=1e-12)
    shared = np.sqrt(np.diag(covariance).astype(float))[1 : model.dim + 1]
    np.testing.assert_allclose(model.effects, model.shared[1:, 0])
    np.testing.assert_allclose(model.effect_deviations, shared, rtol=1e-9)
    assert model.norm == pytest.approx(float(np.linalg.norm(as_vector(model))))


@given(seeds, st.integers(1, 4), st.integers(1, 5), st.booleans())
@lawful
def test_the_head_of_an_additive_arm_is_the_brute_force_posterior(seed, dim, arms, intercept) -> None:
    generator = np.random.default_rng(seed)
    truth = taste(dim, arms, generator)
    prior = AdditiveModel.prior(dim=dim, arms=arms, ridge=1.0, intercept=intercept)
    model = prior.fold(answers_to(truth, 20, 60, generator), estimator="laplace").model
    for arm in range(arms):
        mean, spread = model.head(arm)
        contexts = generator.normal(size=(4, dim))
        u = inputs(contexts)
        np.testing.assert_allclose(u @ mean, model.log_odds(contexts)[:, arm], rtol=0, atol=1e-12)
        np.testing.assert_allclose(((u @ spread) * u).sum(axis=1), model.widths(contexts)[:, arm] ** 2, rtol=1e-9)


def test_draws_lie_around_the_estimate() -> None:
    generator = np.random.default_rng(2)
    model = taste(2, 3, generator)
    draws = np.array([as_vector(drawn) for drawn in model.draws(generator, 4000)])
    deviations = np.sqrt(np.diag(covariance_of(model.precision)).astype(float))
    assert (np.abs(draws.mean(axis=0) - as_vector(model)) < 5 * deviations / np.sqrt(4000)).all()
    once, again = (list(model.draws(np.random.default_rng(5), 3)) for _ in range(2))
    assert once == again


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def dense_evidence(precision: Hierarchy, theta: Wide, matrix: Wide) -> tuple[float, Wide, Wide]:
    """Return λ_t, θ̂ and A after one step of model.md §3 on the whole matrix."""
    dim, shared, before = precision.size - 1, len(precision.shared), float(precision.own[1])
    where = np.array([shared + arm * (dim + 1) + i for arm in range(precision.arms) for i in range(1, dim + 1)])
    known = (1 - before * np.diag(inverse(matrix))[where]).sum()
    tastes = float((known + 1) / ((theta[where] ** 2).sum() + np.longdouble(1) / dim))
    tastes = min(max(tastes, dim / 4), 1000 * dim)
    natural = matrix @ theta
    after = matrix.copy()
    after[where, where] += np.longdouble(tastes) - before
    return tastes, inverse(after) @ natural, after


@given(cases)
@briefly
def test_laplace_finds_the_maximum_of_the_posterior_and_then_the_strength_of_tastes(given_case) -> None:
    prior, data = given_case
    fit = prior.fold(data, estimator="laplace")
    precision = prior.precision
    z, centre = rows_of(precision, data), as_vector(prior)
    theta, matrix = dense_map(z, centre, whole_matrix(precision), data.clicked)
    for _ in range(EVIDENCE_STEPS):
        strength, theta, matrix = dense_evidence(precision, theta, matrix)
        precision = precision.with_own(np.array([precision.own[0], *[strength] * prior.dim]))
    assert fit.model.tastes == pytest.approx(strength, rel=1e-8)
    np.testing.assert_allclose(as_vector(fit.model), theta.astype(float), rtol=0, atol=1e-8)
    scale = float(np.abs(matrix).max())
    np.testing.assert_allclose(whole_matrix(fit.model.precision), matrix.astype(float), rtol=0, atol=1e-8 * scale)


@pytest.mark.parametrize(("size", "bound"), [(1e3, WEAKEST), (1e-12, STRONGEST)])
def test_the_strength_of_tastes_keeps_to_its_bounds(size: float, bound: float) -> None:
    model = taste(3, 40, np.random.default_rng(1), displayed=4000)
    extreme = PersonalModel(shared=model.shared, own=size * model.own, precision=model.precision)
    strength = extreme._evident_tastes()
    if size > 1:
        assert strength == bound * 3
    else:
        assert model._evident_tastes() < strength <= bound * 3
    unbounded = PersonalModel(
        shared=model.shared, own=0 * model.own, precision=model.precision.with_own(np.full(4, 1e9))
    )
    assert unbounded._evident_tastes() <= STRONGEST * 3


def test_tastes_are_found_to_be_strong_where_users_differ_and_weak_where_they_do_not() -> None:
    generator = np.random.default_rng(3)
    found = []
    for spread in (1.0, 0.0):
        truth = PersonalModel.certain(spread * generator.normal(size=(8, 5)) + [0, 1, -1, 0.5, 0])
        model = PersonalModel.prior(dim=4, arms=8, ridge=1.0)
        for _ in range(10):
            model = model.fold(answers_to(truth, 200, 400, generator), estimator="laplace").model
        found.append(model.tastes)
    assert found[0] < 4 < 30 < found[1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_same_data_give_the_same_bits_and_nothing_seen_is_nothing_learned(estimator: str) -> None:
    prior, data = case(5, 3, 4, 2)
    again, copied = case(5, 3, 4, 2)
    assert prior.fold(data, estimator=estimator).model == again.fold(copied, estimator=estimator).model
    assert prior.fold(data, estimator=estimator).model == again.fold(copied, estimator=estimator).model
    empty = Observations(contexts=np.zeros((0, 3)), sessions=data.sessions[:0], arms=data.arms[:0], clicked=np.zeros(0))
    fit = prior.fold(empty, estimator=estimator)
    assert fit.model == prior
    assert fit.steps == 0


@given(cases)
@briefly
def test_leverage_is_that_of_the_dense_matrix(given_case) -> None:
    model, data = given_case
    slopes = np.linspace(0.1, 1, len(data))
    variance, pulls = model.leverage(data, slopes, data)
    z = rows_of(model.precision, data)
    direction = covariance_of(model.precision) @ (z.T @ slopes)
    assert variance == pytest.approx(float((z.T @ slopes) @ direction), rel=1e-9)
    np.testing.assert_allclose(pulls, (z @ direction).astype(float), rtol=0, atol=1e-9)


@given(tastes(), st.sampled_from([1.0, 0.9, 0.01]))
@lawful
def test_forgetting_keeps_the_estimate(scene: Tastes, keep: float) -> None:
    after = scene.model.forget(keep, ridge=1.0)
    assert np.array_equal(as_vector(after), as_vector(scene.model))
    assert np.array_equal(after.precision.information, keep * scene.precision.information)


# ── the gate ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("kind", [PersonalModel, AdditiveModel])
def test_a_tiny_feature_scale_stops_no_fold(kind: Any, scale: float) -> None:
    # A prior that leaves coefficients free: they must grow with 1/scale, which a gate on coefficients would refuse.
    generator = np.random.default_rng(4)
    model = kind.prior(dim=1, arms=2, ridge=scale**2, intercept=True)
    if kind is PersonalModel:
        model = model._with_tastes(scale**2)
    x = scale * generator.choice([-1.0, 1.0], 4000)
    clicked = (generator.random(4000) < np.where(x > 0, 0.9, 0.1)).astype(float)
    data = Observations(contexts=x[:, None], sessions=np.arange(4000), arms=np.arange(4000) % 2, clicked=clicked)
    model = model.fold(data, estimator="laplace").model
    found = sigmoid(model.log_odds(np.array([[scale], [-scale]])))
    np.testing.assert_allclose(found, [[0.9, 0.9], [0.1, 0.1]], atol=0.04)


def test_log_odds_that_jump_are_an_error() -> None:
    model = PersonalModel.prior(dim=1, arms=1, ridge=1e-14)
    model = model._with_tastes(1e-14)
    data = Observations(
        contexts=np.array([[1e4], [-1e4]]), sessions=np.arange(2), arms=np.zeros(2, dtype=np.intp), clicked=np.eye(2)[0]
    )
    with pytest.raises(EstimationError, match=r"moved by .* in one fold, more than 20"):
        model.fold(data, estimator="laplace")


# ── arms and features ────────────────────────────────────────────────────────────────────────────────────────────────


@given(tastes(), st.integers(1, 3))
@lawful
def test_a_new_arm_starts_where_arms_like_it_are(scene: Tastes, count: int) -> None:
    model, width = scene.model, scene.precision.features.shape[1]
    described = scene.generator.normal(size=(count, width - 1)) if width > 1 else None
    after = model.with_arms(count, ridge=1.0, features=described)
    for new in range(count):
        a = np.concatenate([[1.0], described[new] if described is not None else []])
        np.testing.assert_allclose(after.heads_of_arms[model.arms + new], model.shared @ a, rtol=0, atol=1e-13)
    np.testing.assert_allclose(after.heads_of_arms[: model.arms], model.heads_of_arms, rtol=0, atol=1e-13)
    assert (after.bias_deviations[model.arms :] > 0).all()


def test_a_new_additive_arm_starts_at_the_base_rate() -> None:
    generator = np.random.default_rng(6)
    rare = PersonalModel.certain(np.tile([-3.0, 0.0], (20, 1)))
    model = AdditiveModel.prior(dim=1, arms=20, ridge=1.0, intercept=True)
    model = model.fold(answers_to(rare, 2000, 4000, generator), estimator="laplace").model
    fresh = model.with_arms(1, ridge=1.0)
    assert sigmoid(fresh.biases[20:]) == pytest.approx(0.047, abs=0.02)
    assert fresh.bias_deviations[20] > 2 * fresh.bias_deviations[:20].max()
    plain = AdditiveModel.prior(dim=1, arms=20, ridge=1.0).with_arms(1, ridge=1.0)
    assert sigmoid(plain.biases[20:]) == 0.5


@given(tastes())
@lawful
def test_other_features_of_arms_leave_their_heads(scene: Tastes) -> None:
    width = scene.precision.features.shape[1]
    after = scene.model.with_features(scene.generator.normal(size=(scene.model.arms, width - 1)))
    np.testing.assert_allclose(after.heads_of_arms, scene.model.heads_of_arms, rtol=0, atol=1e-12)
    assert np.array_equal(after.shared, scene.model.shared)


@given(tastes(), st.data())
@lawful
def test_chosen_arms_keep_their_heads(scene: Tastes, data: st.DataObject) -> None:
    arms = data.draw(st.permutations(range(scene.model.arms)))[: data.draw(st.integers(1, scene.model.arms))]
    chosen = scene.model.choose_arms(arms)
    assert chosen.arms == len(arms)
    for place, arm in enumerate(arms):
        for one, other in zip(chosen.head(place), scene.model.head(arm), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-9)


# ── packing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@given(tastes())
@lawful
def test_a_packed_model_comes_back_to_the_bit(scene: Tastes) -> None:
    packed = scene.model.pack()
    assert tuple(packed) == PersonalModel.fields
    back = PersonalModel.unpack(packed)
    assert back == scene.model
    for name, array in back.pack().items():
        assert array.tobytes() == packed[name].tobytes(), name
    contexts = scene.generator.normal(size=(3, scene.model.dim))
    assert back.log_odds(contexts).tobytes() == scene.model.log_odds(contexts).tobytes()
    assert back.widths(contexts).tobytes() == scene.model.widths(contexts).tobytes()


def changed(name: str, how: Any) -> dict[str, Floats]:
    packed = {key: array.copy() for key, array in taste(2, 3, np.random.default_rng(0), features=1).pack().items()}
    packed[name] = how(packed[name])
    return packed


def with_nan(array: Floats) -> Floats:
    return np.where(np.arange(array.size).reshape(array.shape) == 0, np.nan, array)


@pytest.mark.parametrize("name", PersonalModel.fields)
@pytest.mark.parametrize("how", [with_nan, lambda array: array[1:], lambda array: array[None], lambda _: "abc"])
def test_arrays_of_the_wrong_shape_or_not_finite_are_refused(name: str, how: Any) -> None:
    with pytest.raises(InputError):
        PersonalModel.unpack(changed(name, how))


def test_a_shared_precision_that_is_symmetric_up_to_rounding_is_taken() -> None:
    nudged = changed("precision.shared", lambda array: array + np.triu(np.full(array.shape, 1e-13), 1))
    shared = PersonalModel.unpack(nudged).precision.shared
    assert np.array_equal(shared, shared.T)


# ── additive with an intercept ───────────────────────────────────────────────────────────────────────────────────────


@given(seeds, st.integers(1, 4), st.integers(1, 5), st.sampled_from([0.3, 1.0, 5.0]))
@briefly
def test_the_additive_model_with_an_intercept_is_the_dense_one_under_its_prior(seed, dim, arms, ridge) -> None:
    generator = np.random.default_rng(seed)
    data = answers_to(taste(dim, arms, generator), 12, 40, generator)
    model = AdditiveModel.prior(dim=dim, arms=arms, ridge=ridge, intercept=True)
    fitted = model.fold(data, estimator="laplace").model
    # The same as a model without one whose contexts begin with 1, under the prior diag(λ_b, ρd, …; λ_b, …).
    z = np.array([[*inputs(data.contexts)[s], *np.eye(arms)[k]] for s, k in zip(data.sessions, data.arms, strict=True)])
    matrix = np.diag([0.5, *[ridge * dim] * dim, *[0.5] * arms])
    theta, after = dense_map(z, np.zeros(len(matrix)), matrix, data.clicked)
    np.testing.assert_allclose(np.concatenate(fitted.coefficients), theta.astype(float), rtol=0, atol=1e-9)
    contexts = generator.normal(size=(3, dim))
    covariance = inverse(after)
    for row, u in enumerate(inputs(contexts)):
        for arm in range(arms):
            here = np.array([*u, *np.eye(arms)[arm]])
            assert fitted.widths(contexts)[row, arm] == pytest.approx(
                float(np.sqrt(here @ covariance @ here)), rel=1e-9
            )
