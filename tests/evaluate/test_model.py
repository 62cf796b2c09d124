"""Cross-fitted click models, the value of slates under them, and the error of estimation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import Floats
from worker.evaluate.estimators import METHODS
from worker.evaluate.model import FittedModel, model_error, slate_values
from worker.evaluate.support import LEAST_CLICKS, Unsupported

from .scenes import Scene, any_model, fitted


def test_a_model_needs_clicks() -> None:
    sessions = Scene(environment="rare").log(30, np.random.default_rng(0))
    assert sessions.clicked.sum() < LEAST_CLICKS
    with pytest.raises(Unsupported, match="clicks"):
        fitted(sessions)


def test_the_direct_method_refuses_arms_that_no_session_has_seen() -> None:
    sessions = Scene(arms=12, share=0.0).log(600, np.random.default_rng(0))
    unseen = sorted(set(range(12)) - set(sessions.slates.ravel().tolist()))
    target = replace(sessions, target_slates=np.full((1, 600, 2), unseen[0]))
    with pytest.raises(Unsupported, match="no session of the log has seen"):
        METHODS["direct"].estimate(target, fitted(sessions), confidence=0.95)


def test_the_model_of_a_session_was_fitted_on_others() -> None:
    sessions = Scene().log(400, np.random.default_rng(0))
    before = fitted(sessions, 5)
    fold = before.folds == 2
    after = fitted(replace(sessions, contexts=np.where(fold[:, None], 9.0, sessions.contexts)), 5)
    assert before.models[2].clicks == after.models[2].clicks
    assert before.models[1].clicks != after.models[1].clicks


def test_the_slopes_of_slate_values_are_their_derivatives() -> None:
    scene, step = Scene(arms=4, horizon=3), 1e-6
    sessions = scene.log(20, np.random.default_rng(0))
    model = any_model(scene, 1)
    slates = sessions.target_slates[0]
    valued = slate_values(model, sessions, slates)

    def derivative(changed: FittedModel) -> Floats:
        return (slate_values(changed, sessions, slates).values[:, 0] - valued.values[:, 0]) / step

    for arm in range(4):
        clicks = AdditiveModel.certain(model.clicks.effects, model.clicks.biases + step * (np.arange(4) == arm))
        slopes = (valued.slopes * (slates == arm)).sum(axis=1)
        np.testing.assert_allclose(derivative(replace(model, clicks=clicks)), slopes, atol=1e-5)
    for h in range(3):
        leaving = model.leaving + step * (np.arange(3) == h)
        np.testing.assert_allclose(derivative(replace(model, leaving=leaving)), -valued.losses[:, h], atol=1e-5)


def test_the_error_of_later_positions_is_smaller() -> None:
    sessions = Scene(arms=4, horizon=3).log(300, np.random.default_rng(0))
    fit = fitted(sessions)
    whole, tail = model_error(fit, sessions), model_error(fit, sessions, after=2)
    assert 0 < tail.variance < whole.variance
    assert model_error(fit, sessions, after=3).variance == 0


def test_the_influences_of_all_sessions_sum_to_the_variance() -> None:
    """The information of the displays, and the spread of their contributions, give the same variance."""
    sessions = Scene(arms=4, horizon=3).log(4000, np.random.default_rng(0))
    error = model_error(fitted(sessions), sessions)
    assert (error.pulls**2).sum() == pytest.approx(error.variance, rel=0.1)
