"""A belief carried over to other columns: exact where columns come, the belief without them where they go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import Floats
from worker.bandit.click_model import Observations
from worker.bandit.groups import Groups
from worker.bandit.personal import PersonalModel

from .beliefs import briefly, lawful, seeds
from .tastes import Tastes, answers_to, taste, tastes, vector, whole_matrix

NO_ADS = np.zeros(0, dtype=np.intp)


def fresh_for(model: PersonalModel, dim: int, *, features: Floats | None = None, ads: int = 0) -> PersonalModel:
    """Return a prior about the arms of a model, with `dim` numbers and `ads` numbers of arms."""
    described = model.precision.features[:, 1:] if features is None else features
    return PersonalModel.prior(
        dim=dim,
        arms=model.arms,
        ridge=1.0,
        features=described,
        horizon=len(model.positions) + 1,
        groups=Groups.alike([1] * dim),
        ad_groups=Groups.alike([1] * described.shape[1]),
    )


def same_ads(model: PersonalModel) -> np.ndarray[Any, np.dtype[np.intp]]:
    return np.arange(model.precision.features.shape[1] - 1)


@given(tastes(), st.data())
@lawful
def test_new_columns_and_another_order_leave_all_predictions(scene: Tastes, data: st.DataObject) -> None:
    model, more = scene.model, data.draw(st.integers(0, 3))
    columns = np.array(data.draw(st.permutations([*range(model.dim), *[-1] * more])), dtype=np.intp)
    carried = model.with_columns(fresh_for(model, len(columns)), columns, same_ads(model))
    old = scene.generator.normal(size=(6, model.dim))
    new = np.where(columns < 0, 0.0, old[:, columns])
    np.testing.assert_allclose(carried.log_odds(new), model.log_odds(old), rtol=0, atol=1e-12)
    np.testing.assert_allclose(carried.widths(new), model.widths(old), rtol=1e-9)
    # What is not known has the prior of a feature among the present ones, shared and own.
    for column in np.flatnonzero(columns < 0).tolist():
        assert carried.own[:, 1 + column].tolist() == [0.0] * model.arms
        assert carried.precision.own[1 + column] == len(columns)
        assert carried.precision.prior[1 + column, 0] == len(columns)


@given(tastes(), st.data())
@lawful
def test_the_rest_is_what_the_same_displays_say_without_the_columns_that_go(scene: Tastes, data: st.DataObject) -> None:
    model = scene.model
    kept = np.array(data.draw(st.lists(st.sampled_from(range(model.dim)), unique=True, max_size=model.dim - 1)) or [0])
    carried = model.with_columns(fresh_for(model, len(kept)), kept.astype(np.intp), same_ads(model))
    rows = [0, *(kept + 1)]
    n, m = model.shared.shape
    shared = [column * n + row for column in range(m) for row in rows]
    positions = [n * m + position for position in range(len(model.positions))]
    own = [n * m + len(positions) + arm * n + row for arm in range(model.arms) for row in rows]
    places = [*shared, *positions, *own]
    matrix = whole_matrix(model.precision)
    expected = np.linalg.solve(matrix[np.ix_(places, places)], (matrix @ vector(*model.coefficients))[places])
    np.testing.assert_allclose(vector(*carried.coefficients), expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(whole_matrix(carried.precision), matrix[np.ix_(places, places)], rtol=1e-9, atol=1e-9)


@given(seeds)
@briefly
def test_features_of_arms_may_come_and_go_and_every_arm_keeps_its_coefficients(seed: int) -> None:
    generator = np.random.default_rng(seed)
    model = taste(3, 4, generator, features=2, horizon=3)
    described = np.column_stack([generator.normal(size=4), model.precision.features[:, 1]])
    carried = model.with_columns(fresh_for(model, 3, features=described), np.arange(3), np.array([-1, 0]))
    np.testing.assert_allclose(carried.heads_of_arms, model.heads_of_arms, rtol=0, atol=1e-12)
    assert carried.shared[:, 1].tolist() == [0.0] * 4, "nothing is known of a new feature of arms"
    assert carried.shared[:, 2].tolist() == model.shared[:, 1].tolist()
    assert carried.precision.information.tolist() == model.precision.information.tolist()


@given(seeds)
@briefly
def test_what_arms_that_are_gone_have_said_is_carried_over(seed: int) -> None:
    generator = np.random.default_rng(seed)
    model = taste(3, 5, generator, features=1, displayed=200, horizon=2).choose_arms([0, 2])
    columns = np.array([2, -1, 0, 1])
    carried = model.with_columns(fresh_for(model, 4), columns, np.array([0]))
    x = generator.normal(size=(5, 4))
    np.testing.assert_allclose(carried.widths(x * (columns >= 0)), model.widths(x[:, [2, 3, 0]]), rtol=1e-9)


@pytest.mark.parametrize("intercept", [True, False])
@given(seed=seeds)
@briefly
def test_the_additive_model_is_carried_over_alike(intercept: bool, seed: int) -> None:
    generator = np.random.default_rng(seed)
    how: dict[str, Any] = {"arms": 3, "ridge": 1.0, "intercept": intercept, "horizon": 3}
    prior = AdditiveModel.prior(dim=3, groups=Groups.alike([1, 2]), **how)
    contexts = generator.normal(size=(60, 3))
    seen = Observations(
        contexts=contexts,
        sessions=np.arange(60),
        arms=generator.integers(0, 3, 60),
        positions=generator.integers(0, 3, 60),
        clicked=(generator.random(60) < 0.3).astype(float),
    )
    model = prior.fold(seen, estimator="newton").model
    grown = model.with_columns(AdditiveModel.prior(dim=4, **how), np.array([1, -1, 2, 0]), NO_ADS)
    new = contexts[:, [1, 0, 2, 0]] * [1, 0, 1, 1]
    np.testing.assert_allclose(grown.log_odds(new), model.log_odds(contexts), rtol=0, atol=1e-12)
    np.testing.assert_allclose(grown.widths(new), model.widths(contexts), rtol=1e-9)
    np.testing.assert_array_equal(grown.position_effects, model.position_effects)
    # The same displays, seen without a column: one Newton step from the same prior is linear in what they say.
    less = model.with_columns(AdditiveModel.prior(dim=2, **how), np.array([0, 2]), NO_ADS)
    rows = np.array(
        [*range(int(intercept)), *(np.array([0, 2]) + intercept), *range(3 + intercept, model.precision.dim)]
    )
    np.testing.assert_allclose(less.said()[0], model.said()[0][rows], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(less.said()[1], model.said()[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_without_a_column_the_belief_is_close_to_one_that_never_had_it(correlation: float) -> None:
    generator = np.random.default_rng(4)
    data = answers_to(taste(3, 4, generator, displayed=0), 4000, 12_000, generator)
    data.contexts[:, 2] = correlation * data.contexts[:, 0] + np.sqrt(1 - correlation**2) * data.contexts[:, 2]
    model = PersonalModel.prior(dim=3, arms=4, ridge=1.0).fold(data, estimator="laplace").model
    less = model.with_columns(fresh_for(model, 2), np.array([0, 1]), same_ads(model))
    never = PersonalModel.prior(dim=2, arms=4, ridge=1.0)
    never = never.fold(replace(data, contexts=data.contexts[:, :2]), estimator="laplace").model
    users = generator.normal(size=(500, 2))
    assert np.abs(less.log_odds(users) - never.log_odds(users)).mean() < 0.05
