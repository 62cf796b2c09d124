"""Noticing that single arms have changed, compared with the whole matrix and dense evidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from worker.bandit.click_model import inputs
from worker.bandit.learning import CERTAIN, Windows
from worker.bandit.personal import PersonalModel

from .beliefs import lawful
from .reference import dense_map, inverse, logistic
from .tastes import Tastes, answers_to, covariance_of, head_of, marginal, prior_of, shared_size, taste, tastes, vector

EXACT = 1e12  # precision of what is known


@given(tastes())
@lawful
def test_the_evidence_of_each_arm_is_laplace_s_on_its_own_displays(scene: Tastes) -> None:
    model, arms = scene.model, scene.model.arms
    other = taste(model.dim, arms, scene.generator, horizon=len(model.position_effects))
    data = answers_to(other, 12, 40, scene.generator)
    by_arm, offsets = model.by_arm(data), model.position_effects[data.positions]
    shown, window = by_arm.shown, Windows(by_arm, data.clicked, offsets)
    new = replace(model, own=np.zeros(model.own.shape))
    wide = np.broadcast_to(model.precision.new_covariances, model.precision.covariances.shape)
    for centres, covariances in ((model.heads_of_arms, model.precision.covariances), (new.heads_of_arms, wide)):
        found = window.evidence(centres[shown], covariances[shown])
        for arm, evidence in zip(shown, found, strict=True):
            own = data.arms == arm
            z = np.column_stack([inputs(data.contexts)[data.sessions[own]], offsets[own]])
            matrix = np.diag(np.full(z.shape[1], EXACT))
            matrix[:-1, :-1] = inverse(covariances[arm])
            centre = np.append(centres[arm], 1.0)
            theta, information = dense_map(z, centre, matrix, data.clicked[own])
            chances, off = logistic(z @ theta), theta - centre
            likelihood = np.log(np.where(data.clicked[own] > 0, chances, 1 - chances)).sum()
            before, after = (np.linalg.slogdet(np.asarray(one, dtype=float))[1] for one in (matrix, information))
            assert evidence == pytest.approx(
                float(likelihood - off @ matrix @ off / 2) + (before - after) / 2, rel=1e-9
            )


@given(tastes())
@lawful
def test_an_arm_that_begins_anew_leaves_what_it_said_of_all_and_changes_no_other(scene: Tastes) -> None:
    model, gone = scene.model, np.array([scene.model.arms - 1])
    after, others = model.precision.with_new(gone), range(model.arms - 1)
    assert model.precision.inverses.shape == after.inverses.shape  # whether it was factorised before or not
    found, count = np.asarray(covariance_of(after), dtype=float), len(prior_of(after)) - after.size
    np.testing.assert_allclose(
        found[:count, :count], marginal(model.precision, others).astype(float), rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(found[count:, count:], np.diag(1 / after.own), rtol=1e-9, atol=1e-12)
    assert np.abs(found[count:, :count]).max() <= 1e-12
    through = head_of(after, int(gone[0]))
    dense = through @ covariance_of(after) @ through.T
    new = np.broadcast_to(model.precision.new_covariances, after.covariances.shape)[-1]
    np.testing.assert_allclose(new, dense.astype(float), rtol=1e-9, atol=1e-12)
    # What is solved for from what displays have said is the same belief as before, without the arm's own part.
    own = model.own.copy()
    own[gone] = 0.0
    anew = replace(model, own=own, precision=after)
    solved = after.solve(*anew.said())
    np.testing.assert_allclose(vector(*solved)[:count], vector(*model.coefficients)[:count], rtol=0, atol=1e-9)
    assert shared_size(after) == shared_size(model.precision)


@pytest.mark.parametrize("changing", [False, True])
def test_an_ad_that_changes_begins_anew_and_the_others_stay(changing: bool) -> None:
    generator = np.random.default_rng(5)
    coefficients = generator.normal(size=(8, 3)) * [1.0, 1.0, 1.0] - [1.5, 0.0, 0.0]
    truths = [
        PersonalModel.certain(coefficients),
        PersonalModel.certain(coefficients * np.where(np.arange(8) == 2, -1, 1)[:, None]),
    ]
    model, noticed = PersonalModel.prior(dim=2, arms=8, ridge=1.0), []
    for window in range(24):
        data = answers_to(truths[int(changing and window >= 12)], 150, 300, generator)
        fit = model.fold(data, estimator="laplace", forgetting="auto")
        noticed += [(window, arm) for arm in fit.changed]
        assert fit.kept == 1
        model = fit.model
    assert [arm for _, arm in noticed] == [2] * changing
    assert all(window in range(12, 15) for window, _ in noticed)
    assert model.doubts.max() < CERTAIN
    assert not model.forget(0.5).doubts.any()
