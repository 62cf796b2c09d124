"""Numbers of five bytes: what is rounded, how far, and what stays as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bandit.tastes import Tastes, answers_to, taste, tastes
from worker.bandit.personal import PersonalModel
from worker.errors import EstimationError, InputError
from worker.stream import version_sizes
from worker.stream.events import Import, encode_event
from worker.stream.features import Features
from worker.stream.learner import Learner
from worker.stream.packing import SHORT, nearest, packed, rounded, unpacked
from worker.stream.parameters import Parameters, decode_parameters
from worker.stream.settings import Arm, LearningSettings
from worker.stream.version_records import encode_parameters, parameters_document
from worker.stream.version_sizes import largest_size

INFORMATION = "precision.information"
numbers = st.lists(st.floats(-1e38, 1e38), min_size=1, max_size=20).map(np.array)


def version(model: PersonalModel) -> Parameters:
    """Return a version with a model."""
    arms = tuple(Arm(arm=f"ad-{k}", reward=1.0) for k in range(model.arms))
    horizon = len(model.positions) + 1
    first = Parameters.first(LearningSettings(dim=model.dim, horizon=horizon, standardise=False), arms)
    return replace(first, model=model)


@given(numbers)
def test_a_number_is_rounded_to_31_bits_as_exact_arithmetic_does(array):
    mantissas, exponents = np.frexp(array)
    exact = np.ldexp(np.rint(mantissas * 2.0**32), exponents - 32)  # to even in between
    assert np.array_equal(nearest(array), np.where(np.abs(exact) < 2.0**-126, 0.0, exact))


@given(numbers)
def test_what_was_rounded_takes_five_bytes_and_comes_back_to_the_bit(array):
    short = nearest(array)
    document = packed(INFORMATION, short)
    assert len(document["data"]) <= 4 * (5 * len(array) // 3 + 1)
    assert np.array_equal(unpacked(document), short)
    assert np.array_equal(nearest(short), short), "rounding again changes nothing"


@pytest.mark.parametrize("array", [np.array([0.1]), np.array([np.nan]), np.array([1e300])])
def test_what_was_not_rounded_is_written_without_loss(array):
    document = packed(INFORMATION, array)
    assert "bytes" not in document
    assert np.array_equal(unpacked(document), array, equal_nan=True)


@pytest.mark.parametrize("array", [np.array([3.5e38]), np.array([np.inf]), np.array([np.nan])])
def test_numbers_beyond_the_range_are_an_error_of_the_estimate(array):
    with pytest.raises(EstimationError, match="too large for a version"):
        nearest(array)


@pytest.mark.parametrize("document", [{"bytes": 4}, {"bytes": "5"}, {"bytes": 5, "shape": [3]}, {"data": "AAAA"}])
def test_a_damaged_array_is_refused(document):
    with pytest.raises((ValueError, TypeError)):
        unpacked({"shape": [1], "data": "AAAAAAA=", "bytes": 5, **document})


@given(scene=tastes())
def test_a_rounded_model_predicts_the_same_and_is_what_its_record_says(scene: Tastes):
    model = scene.model.choose_arms(range((scene.model.arms + 1) // 2))  # with inherited information
    short = rounded(model, intercept=True)
    contexts = scene.generator.normal(size=(20, model.dim))
    assert np.array_equal(short.log_odds(contexts), model.log_odds(contexts))
    assert short.widths(contexts) == pytest.approx(model.widths(contexts), rel=1e-8)
    assert rounded(short, intercept=True) is short
    made = version(short)
    assert decode_parameters(encode_parameters(made)).model == short
    assert len(encode_parameters(made)) <= largest_size(made.arms, short, made.settings)


def test_folds_on_rounded_versions_stay_with_those_on_exact_ones():
    generator = np.random.default_rng(7)
    truth = taste(3, 4, generator, features=2, horizon=3)
    exact = short = PersonalModel.prior(
        dim=3, arms=4, ridge=1.0, horizon=3, features=np.ones((4, 2)), groups=truth.groups, ad_groups=truth.ad_groups
    )
    for _ in range(50):
        data = answers_to(truth, 200, 400, generator)
        exact = exact.fold(data, estimator="laplace").model
        short = rounded(short.fold(data, estimator="laplace").model, intercept=True)
    contexts = generator.normal(size=(50, 3))
    assert short.log_odds(contexts) == pytest.approx(exact.log_odds(contexts), rel=1e-6, abs=1e-6)
    assert short.widths(contexts) == pytest.approx(exact.widths(contexts), rel=1e-6)


@pytest.mark.parametrize("displays", [1e3, 1e6, 1e8])
def test_information_of_collinear_columns_stays_positive_definite_for_a_hundred_million_displays(displays):
    generator = np.random.default_rng(1)
    prior = PersonalModel.prior(dim=32, arms=1, ridge=1.0)
    marks = np.eye(32)[
        generator.integers(32, size=5_000)
    ]  # with the intercept, the columns of a category are collinear
    rows = np.hstack([np.ones((5_000, 1)), marks]) * generator.uniform(0.1, 0.5, (5_000, 1))
    information = (rows.T @ rows)[None] * displays / 5_000
    model = replace(prior, precision=replace(prior.precision, information=information))
    assert rounded(model, intercept=True).precision.is_positive_definite


def test_an_import_is_refused_if_what_left_out_ads_have_said_makes_the_version_too_large(monkeypatch):
    declared = Features.of_table({"context": {"age": "number", "city": {"hashed": 400}}, "ads": {"brand": ["x", "y"]}})
    settings = LearningSettings(dim=401, features=declared, standardise=False, window=3_600_000)
    ads = tuple(Arm(arm=name, reward=1.0, features=(("brand", "x"),)) for name in "abc")
    learner, given = Learner(settings, ads[:2]), Parameters.first(settings, ads)
    first = learner.current
    room = largest_size(first.arms, first.model, first.settings) + 500
    order = encode_event(Import(parameters=parameters_document(given), arms=False))
    with monkeypatch.context() as patch:
        patch.setattr(version_sizes.too_large, "__defaults__", (room,))
        (refusal,) = learner.handle([(0, order)]).refusals
    assert refusal.reason.endswith(
        "of 401 columns of contexts and 2 of ads, 'city' has the most, 400: hash it into fewer, or leave it out"
    )
    assert learner.handle([(1, order)]).versions


def test_where_rounding_leaves_no_precision_the_fold_is_refused():
    prior = PersonalModel.prior(dim=2, arms=1, ridge=1.0)
    row = np.array([[1e7, 1e9 / 3, 1e9 / 7]])
    model = replace(prior, precision=replace(prior.precision, information=(row.T @ row)[None]))
    assert model.precision.is_positive_definite
    with pytest.raises(InputError, match="not positive definite"):
        rounded(model, intercept=True)


@pytest.mark.parametrize(
    ("arms", "dim", "ads", "gone", "most"),
    [(1_000, 32, 0, 0, 5.5e6), (40, 85, 3, 0, 3e6), (41, 85, 3, 1, 3e6), (40, 85, 14, 0, 3e6)],
)
def test_versions_are_as_large_as_operations_md_says(arms, dim, ads, gone, most):
    model = taste(dim, arms, np.random.default_rng(2), features=ads, displayed=10 * arms, horizon=5)
    if gone:
        model = model.choose_arms(range(arms - gone))
    model = rounded(model, intercept=True)
    assert all("bytes" in packed(name, array) for name, array in model.pack().items() if name in SHORT)
    size = len(encode_parameters(version(model)))
    n, m, shown = dim + 1, ads + 1, arms - gone
    formula = shown * (3.3 * n**2 + 6.7 * 4 * n + 10.7 * n + 300) + (3.3 * (n * m) ** 2 if gone else 0)
    assert size <= most
    assert size == pytest.approx(formula, rel=0.1)
