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
from worker.bandit.estimators import ESTIMATORS, estimate, evidence
from worker.bandit.groups import LEAST, MOST, Groups
from worker.bandit.personal import EVIDENCE_STEPS, PersonalModel
from worker.errors import EstimationError, InputError

from .beliefs import briefly, lawful, seeds, seen
from .reference import Wide, dense_map, inverse, logistic
from .tastes import (
    Tastes,
    answers_to,
    columns,
    covariance_of,
    head_of,
    prior_of,
    row_of,
    rows_of,
    shared_size,
    taste,
    tastes,
    vector,
    whole_matrix,
)

Floats = NDArray[np.float64]


def as_vector(model: PersonalModel) -> Floats:
    return vector(*model.coefficients)


def case(seed: int, dim: int, arms: int, features: int, horizon: int = 3) -> tuple[PersonalModel, Observations]:
    """Return a belief that has learned something and an episode of users who behave otherwise."""
    generator = np.random.default_rng(seed)
    prior = taste(dim, arms, generator, features=features, horizon=horizon)
    return prior, answers_to(taste(dim, arms, generator, features=features, horizon=horizon), 12, 40, generator)


cases = st.builds(case, seeds, st.integers(1, 3), st.integers(1, 4), columns, st.integers(1, 4))


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
        assert model.widths(np.zeros((1, model.dim)))[0][arm] == pytest.approx(np.sqrt(spread[0, 0]), rel=1e-12)
    np.testing.assert_allclose(model.effects, model.shared[1:, 0])


@given(seeds, st.integers(1, 4), st.integers(1, 5), st.booleans())
@lawful
def test_the_head_of_an_additive_arm_is_the_brute_force_posterior(seed, dim, arms, intercept) -> None:
    generator = np.random.default_rng(seed)
    truth = taste(dim, arms, generator, horizon=3)
    prior = AdditiveModel.prior(dim=dim, arms=arms, ridge=1.0, intercept=intercept, horizon=3)
    model = prior.fold(answers_to(truth, 20, 60, generator), estimator="laplace").model
    for arm in range(arms):
        mean, spread = model.head(arm)
        contexts = generator.normal(size=(4, dim))
        u = inputs(contexts)
        np.testing.assert_allclose(u @ mean, model.log_odds(contexts)[:, arm], rtol=0, atol=1e-12)
        np.testing.assert_allclose(((u @ spread) * u).sum(axis=1), model.widths(contexts)[:, arm] ** 2, rtol=1e-9)


def test_draws_lie_around_the_estimate() -> None:
    generator = np.random.default_rng(2)
    model = taste(2, 3, generator, horizon=3)
    draws = np.array([as_vector(drawn) for drawn in model.draws(generator, 4000)])
    deviations = np.sqrt(np.diag(covariance_of(model.precision)).astype(float))
    assert (np.abs(draws.mean(axis=0) - as_vector(model)) < 5 * deviations / np.sqrt(4000)).all()
    once, again = (list(model.draws(np.random.default_rng(5), 3)) for _ in range(2))
    assert once == again


# ── learning ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def dense_strengths(model: PersonalModel, theta: Wide, matrix: Wide) -> tuple[Floats, Floats, Wide, Wide]:
    """Return λ_g of contexts and of arms, θ̂ and A after one step of model.md §9 on the whole matrix, one by one."""
    variances, prior, precision = np.diag(inverse(matrix)), prior_of(model.precision), model.precision
    size = precision.size
    first = shared_size(precision)
    natural, after = matrix @ theta, matrix.copy()

    def strength(where: list[int], old: list[float], scales: list[float], groups: Groups, g: int) -> float:
        count, square = len(groups.widths), float(groups.squares[g])
        known = sum(1 - x * scale * variances[i] for i, x, scale in zip(where, old, scales, strict=True))
        length = sum(scale * theta[i] ** 2 for i, scale in zip(where, scales, strict=True))
        found = float((known + 1) / (length + np.longdouble(1) / (count * square)))
        return min(max(found, square / 4), 1000 * count * square)

    own, ads, start = [], [], 1
    for g, width in enumerate(model.groups.widths):
        where = [first + arm * size + i for arm in range(model.arms) for i in range(start, start + width)]
        own.append(strength(where, [prior[i] for i in where], [1.0] * len(where), model.groups, g))
        after[where, where] += own[-1] - prior[where]
        start += width
    start = 1
    for g, width in enumerate(model.ad_groups.widths):
        where = [column * size + i for column in range(start, start + width) for i in range(size)]
        scales = [float(precision.prior[i % size, 0]) for i in where]
        old = [prior[i] / scale for i, scale in zip(where, scales, strict=True)]
        ads.append(strength(where, old, scales, model.ad_groups, g))
        after[where, where] += ads[-1] * np.array(scales) - prior[where]
        start += width
    return np.array(own), np.array(ads), inverse(after) @ natural, after


@given(cases)
@briefly
def test_laplace_finds_the_maximum_of_the_posterior_and_then_the_strength_of_features(given_case) -> None:
    prior, data = given_case
    fit = prior.fold(data, estimator="laplace")
    z, model = rows_of(prior.precision, data), prior
    theta, matrix = dense_map(z, as_vector(prior), whole_matrix(prior.precision), data.clicked)
    for _ in range(EVIDENCE_STEPS):
        own, ads, theta, matrix = dense_strengths(model, theta, matrix)
        model = model._with_strengths(own, ads)
    np.testing.assert_allclose(fit.model.strengths, own, rtol=1e-9)
    np.testing.assert_allclose(fit.model.ad_strengths, ads, rtol=1e-9)
    np.testing.assert_allclose(as_vector(fit.model), theta.astype(float), rtol=0, atol=1e-9)
    scale = float(np.abs(matrix).max())
    np.testing.assert_allclose(whole_matrix(fit.model.precision), matrix.astype(float), rtol=0, atol=1e-9 * scale)


def test_the_strength_of_a_feature_keeps_to_its_bounds() -> None:
    model = taste(3, 40, np.random.default_rng(1), displayed=4000, features=2)
    huge, tiny = (
        model.updated((size * model.shared, model.positions, size * model.own), model.precision) for size in (1e3, 1e-9)
    )
    for found, groups in ((huge._evident(), model.groups), (huge._evident_of_ads(), model.ad_groups)):
        assert found.tolist() == (LEAST * groups.squares).tolist()
    for found, groups in ((tiny._evident(), model.groups), (tiny._evident_of_ads(), model.ad_groups)):
        assert (found > groups.first).all()
        assert (found <= MOST * groups.first).all()


def test_a_category_has_the_prior_variance_of_a_number_whatever_its_levels() -> None:
    # One column of a category is 1: divided by the number of its levels its prior would allow it next to nothing.
    for groups in (Groups.alike([1, 50]), Groups.measured([1, 50], np.hstack([np.ones((50, 1)), np.eye(50)]))):
        model = PersonalModel.prior(dim=51, arms=2, ridge=1.0, groups=groups)
        number, category = np.eye(51)[:1], np.eye(51)[50:]
        base = model.widths(np.zeros((1, 51)))
        assert model.widths(number) ** 2 - base**2 == pytest.approx(1.0)  # two features: ½ shared and ½ own
        assert model.widths(category) ** 2 - base**2 == pytest.approx(1.0)


def test_tastes_are_found_to_be_strong_where_users_differ_and_weak_where_they_do_not() -> None:
    generator = np.random.default_rng(3)
    found = []
    for spread in (1.0, 0.0):
        truth = PersonalModel.certain(spread * generator.normal(size=(8, 5)) + [0, 1, -1, 0.5, 0])
        model = PersonalModel.prior(dim=4, arms=8, ridge=1.0)
        for _ in range(10):
            model = model.fold(answers_to(truth, 200, 400, generator), estimator="laplace").model
        found.append(model.strengths.item())
    assert found[0] < 4 < 30 < found[1]


def test_the_feature_that_matters_is_told_from_the_one_that_does_not() -> None:
    generator = np.random.default_rng(4)
    tastes_of = np.hstack([np.zeros((8, 1)), generator.normal(size=(8, 4)), np.zeros((8, 4))])
    truth = PersonalModel.certain(tastes_of)
    model = PersonalModel.prior(dim=8, arms=8, ridge=1.0, groups=Groups.alike([4, 4]))
    for _ in range(10):
        model = model.fold(answers_to(truth, 200, 400, generator), estimator="laplace").model
    assert model.strengths[0] < 2 < 20 < model.strengths[1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_same_data_give_the_same_bits_and_nothing_seen_is_nothing_learned(estimator: str) -> None:
    prior, data = case(5, 3, 4, 2)
    again, copied = case(5, 3, 4, 2)
    assert prior.fold(data, estimator=estimator).model == again.fold(copied, estimator=estimator).model
    assert prior.fold(data, estimator=estimator).model == again.fold(copied, estimator=estimator).model
    fit = prior.fold(seen(np.zeros((0, 3)), [], [], []), estimator=estimator, forgetting="auto")
    assert fit.model == prior
    assert fit.kept == 1.0


@given(tastes(), st.sampled_from([1.0, 0.9, 0.01]))
@lawful
def test_forgetting_fades_natural_parameters(scene: Tastes, keep: float) -> None:
    model = scene.model.choose_arms(range((scene.model.arms + 1) // 2))  # with inherited information
    after, prior, whole = model.forget(keep), np.diag(prior_of(model.precision)), whole_matrix(model.precision)
    faded = prior + keep * (whole - prior)
    close_to(whole_matrix(after.precision), faded)
    close_to(as_vector(after), inverse(faded) @ (keep * (whole @ as_vector(model))))


def close_to(actual: Floats, expected: Wide | Floats) -> None:
    """Check to 1e-9 of the largest entry."""
    wanted = np.asarray(expected, dtype=np.float64)
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-9 * max(1.0, np.abs(wanted).max()))


@given(cases, st.booleans())
@briefly
def test_the_evidence_is_laplace_s_on_the_whole_matrix(given_case, additive: bool) -> None:
    before, data = given_case
    if additive:
        before = AdditiveModel.prior(dim=before.dim, arms=before.arms, ridge=1.0, intercept=True, horizon=3)
        z, centre, matrix = additive_rows(before, data), np.zeros(before.dim + 3 + before.arms), np.diag(flat(before))
    else:
        z, centre, matrix = rows_of(before.precision, data), as_vector(before), whole_matrix(before.precision)
    theta, information = dense_map(z, centre, matrix, data.clicked)
    chances, off = logistic(z @ theta), theta - centre
    likelihood = np.log(np.where(data.clicked > 0, chances, 1 - chances)).sum()
    determinants = [np.linalg.slogdet(np.asarray(one, dtype=float))[1] for one in (matrix, information)]
    expected = float(likelihood - off @ matrix @ off / 2) + (determinants[0] - determinants[1]) / 2
    after = estimate(before, data, estimator="laplace")
    assert evidence(before, after, data) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", [PersonalModel, AdditiveModel])
@pytest.mark.parametrize(("change", "least"), [(False, 1.0), (True, 0.1)])
def test_the_window_itself_decides_what_is_forgotten(kind: Any, change: bool, least: float) -> None:
    generator = np.random.default_rng(8)
    truths = [PersonalModel.certain(generator.normal(size=(6, 3)) * [2.0, 1.0, 1.0]) for _ in range(2)]
    model, kept = kind.prior(dim=2, arms=6, ridge=1.0, intercept=True), []
    for window in range(12):
        truth = truths[int(change and window >= 8)]
        fit = model.fold(answers_to(truth, 150, 300, generator), estimator="laplace", forgetting="auto")
        model, kept = fit.model, [*kept, fit.kept]
    assert kept[:8] == [1.0] * 8
    assert min(kept[8:]) == least
    assert kept[8] < 1 or not change
    fixed = model.fold(answers_to(truth, 150, 300, generator), estimator="laplace", forgetting=0.9)
    assert fixed.kept == 0.9


# ── the gate ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-6])
@pytest.mark.parametrize("kind", [PersonalModel, AdditiveModel])
def test_a_tiny_feature_scale_stops_no_fold(kind: Any, scale: float) -> None:
    # A prior that leaves coefficients free: they must grow with 1/scale, which a gate on coefficients would refuse.
    generator = np.random.default_rng(4)
    model = kind.prior(dim=1, arms=2, ridge=scale**2, intercept=True)
    if kind is PersonalModel:
        model = model._with_strengths(np.array([scale**2]), np.zeros(0))
    x = scale * generator.choice([-1.0, 1.0], 4000)
    clicked = (generator.random(4000) < np.where(x > 0, 0.9, 0.1)).astype(float)
    data = seen(x[:, None], np.arange(4000), np.arange(4000) % 2, clicked)
    model = model.fold(data, estimator="laplace").model
    found = sigmoid(model.log_odds(np.array([[scale], [-scale]])))
    np.testing.assert_allclose(found, [[0.9, 0.9], [0.1, 0.1]], atol=0.04)


def test_log_odds_that_jump_are_an_error() -> None:
    model = PersonalModel.prior(dim=1, arms=1, ridge=1e-14)
    model = model._with_strengths(np.array([1e-14]), np.zeros(0))
    data = seen(np.array([[1e4], [-1e4]]), [0, 1], [0, 0], [1, 0])
    with pytest.raises(EstimationError, match=r"moved by .* in one fold, more than 20"):
        model.fold(data, estimator="laplace")


# ── arms and features ────────────────────────────────────────────────────────────────────────────────────────────────


@given(tastes(), st.integers(1, 3))
@lawful
def test_a_new_arm_starts_where_arms_like_it_are(scene: Tastes, count: int) -> None:
    model, width = scene.model, scene.precision.features.shape[1]
    described = scene.generator.normal(size=(count, width - 1)) if width > 1 else None
    after = model.with_arms(count, features=described)
    for new in range(count):
        a = np.concatenate([[1.0], described[new] if described is not None else []])
        np.testing.assert_allclose(after.heads_of_arms[model.arms + new], model.shared @ a, rtol=0, atol=1e-13)
    np.testing.assert_allclose(after.heads_of_arms[: model.arms], model.heads_of_arms, rtol=0, atol=1e-13)
    assert (after.widths(np.zeros((1, after.dim)))[0][model.arms :] > 0).all()


def test_a_new_additive_arm_starts_at_the_base_rate() -> None:
    generator = np.random.default_rng(6)
    rare = PersonalModel.certain(np.tile([-3.0, 0.0], (20, 1)))
    model = AdditiveModel.prior(dim=1, arms=20, ridge=1.0, intercept=True)
    model = model.fold(answers_to(rare, 2000, 4000, generator), estimator="laplace").model
    fresh = model.with_arms(1)
    assert sigmoid(fresh.biases[20:]) == pytest.approx(0.047, abs=0.02)
    assert fresh.widths(np.zeros((1, fresh.dim)))[0][20] > 2 * fresh.widths(np.zeros((1, fresh.dim)))[0][:20].max()
    plain = AdditiveModel.prior(dim=1, arms=20, ridge=1.0).with_arms(1)
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
    model = scene.model.choose_arms(range((scene.model.arms + 1) // 2))  # with inherited information
    packed = model.pack()
    back = PersonalModel.unpack(packed)
    assert back == model
    for name, array in back.pack().items():
        assert array.tobytes() == packed[name].tobytes(), name
    contexts = scene.generator.normal(size=(3, scene.model.dim))
    assert back.log_odds(contexts).tobytes() == model.log_odds(contexts).tobytes()
    assert back.widths(contexts).tobytes() == model.widths(contexts).tobytes()


def changed(name: str, how: Any) -> dict[str, Floats]:
    model = taste(2, 4, np.random.default_rng(0), features=1, horizon=3).choose_arms([0, 1, 3])
    packed = {key: array.copy() for key, array in model.pack().items()}
    packed[name] = how(packed[name])
    return packed


def with_nan(array: Floats) -> Floats:
    return np.where(np.arange(array.size).reshape(array.shape) == 0, np.nan, array)


@pytest.mark.parametrize("name", PersonalModel.prior(dim=1, arms=1, ridge=1.0).pack())
@pytest.mark.parametrize("how", [with_nan, lambda array: array[1:], lambda array: array[None], lambda _: "abc"])
def test_arrays_of_the_wrong_shape_or_not_finite_are_refused(name: str, how: Any) -> None:
    with pytest.raises(InputError):
        PersonalModel.unpack(changed(name, how))


# ── additive with an intercept ───────────────────────────────────────────────────────────────────────────────────────


def additive_rows(model: AdditiveModel, data: Observations) -> Floats:
    """Return z = [1; x; position; onehot(k)] of displays."""
    u, effects = inputs(data.contexts), np.eye(len(model.position_effects))[:, 1:]
    late = effects[np.minimum(data.positions, len(effects) - 1)]
    return np.hstack([u[data.sessions], late, np.eye(model.arms)[data.arms]])


def flat(model: AdditiveModel, ridge: float = 1.0) -> Floats:
    """Return the diagonal of the prior: λ_b, ρ G q_g of each column, 1 of each position, λ_b of each arm."""
    positions = len(model.position_effects) - 1
    return np.array([0.5, *[ridge * model.dim] * model.dim, *[1.0] * positions, *[0.5] * model.arms])


@given(seeds, st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.sampled_from([0.3, 1.0, 5.0]))
@briefly
def test_the_additive_model_with_an_intercept_is_the_dense_one_under_its_prior(seed, dim, arms, horizon, ridge) -> None:
    generator = np.random.default_rng(seed)
    data = answers_to(taste(dim, arms, generator, horizon=horizon), 12, 40, generator)
    model = AdditiveModel.prior(dim=dim, arms=arms, ridge=ridge, intercept=True, horizon=horizon)
    fitted = model.fold(data, estimator="laplace").model
    prior = np.diag(flat(model, ridge))
    theta, after = dense_map(additive_rows(model, data), np.zeros(len(prior)), prior, data.clicked)
    close_to(np.concatenate(fitted.coefficients), theta)
    np.testing.assert_allclose(fitted.position_effects[1:], theta[dim + 1 : dim + horizon].astype(float), atol=1e-9)
    contexts = generator.normal(size=(3, dim))
    covariance = inverse(after)
    for row, u in enumerate(inputs(contexts)):
        for arm in range(arms):
            here = np.array([*u, *[0.0] * (horizon - 1), *np.eye(arms)[arm]])
            width = float(np.sqrt(here @ covariance @ here))
            assert fitted.widths(contexts)[row, arm] == pytest.approx(width, rel=1e-9)
    faded = prior + 0.3 * (after - prior)
    close_to(np.concatenate(fitted.forget(0.3).coefficients), inverse(faded) @ (0.3 * (after @ theta)))
    assert AdditiveModel.unpack(fitted.pack(), intercept=True) == fitted


@pytest.mark.parametrize("kind", [PersonalModel, AdditiveModel])
def test_a_longer_horizon_adds_positions_of_which_nothing_is_known(kind: Any) -> None:
    generator = np.random.default_rng(9)
    prior = kind.prior(dim=2, arms=3, ridge=1.0, intercept=True, horizon=2)
    model = prior.fold(answers_to(taste(2, 3, generator, horizon=2), 30, 90, generator), estimator="laplace").model
    longer = model.choose_arms([0, 2]).with_horizon(4)
    assert longer.position_effects.tolist() == [*model.position_effects.tolist(), 0.0, 0.0]
    assert model.with_horizon(1) == model
    contexts = generator.normal(size=(3, 2))
    np.testing.assert_allclose(longer.widths(contexts), model.widths(contexts)[:, [0, 2]], rtol=1e-12)
    data = seen(contexts, [0, 1, 2], [0, 1, 1], [1, 0, 1], [3, 2, 9])  # beyond the horizon: as at its last position
    assert longer.fold(data, estimator="laplace").model.position_effects[3] > 0
