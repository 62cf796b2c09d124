"""Cross-fitted click models, the value of slates under them, and the error of estimation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given

from worker.bandit.additive import AdditiveModel
from worker.bandit.answers import AnswerCounts, AnswerRates
from worker.bandit.arrays import Floats, Ints
from worker.bandit.click_model import ClickModel
from worker.bandit.personal import PersonalModel
from worker.evaluate.estimators import METHODS
from worker.evaluate.model import FittedModel, answer_leverage, model_error, slate_values
from worker.evaluate.support import LEAST_CLICKS, Unsupported

from .scenes import Scene, any_model, fitted, seeds


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


@pytest.mark.parametrize("seed", [0, 1], ids=["additive", "personal"])
def test_the_slopes_of_slate_values_are_their_derivatives(seed: int) -> None:
    scene, step = Scene(arms=4, horizon=3), 1e-6
    sessions = scene.log(20, np.random.default_rng(0))
    model = any_model(scene, seed)
    slates = sessions.target_slates[0]
    valued = slate_values(model, sessions, slates)

    def derivative(changed: FittedModel) -> Floats:
        return (slate_values(changed, sessions, slates).values[:, 0] - valued.values[:, 0]) / step

    for arm in range(4):
        slopes = (valued.slopes * (slates == arm)).sum(axis=1)
        np.testing.assert_allclose(derivative(replace(model, clicks=moved(model.clicks, arm, step))), slopes, atol=1e-5)
    for h, arm in product(range(3), range(4)):
        rates = Cells(arms=model.rates.arms, positions=model.rates.positions, moved=(h, arm), step=step)
        slopes = (valued.answer_slopes * (slates == arm))[:, h]
        np.testing.assert_allclose(derivative(replace(model, rates=rates)), slopes, atol=1e-5)


def moved(model: ClickModel, arm: int, step: float) -> ClickModel:
    """The model with the log-odds of one arm raised, for every context."""
    raised = step * (np.arange(model.arms) == arm)
    if isinstance(model, PersonalModel):
        return replace(model, own=model.own + np.outer(raised, np.eye(model.dim + 1)[0]))
    return AdditiveModel.certain(model.effects, model.biases + raised)


@dataclass(frozen=True, kw_only=True, eq=False)
class Cells(AnswerRates):
    """Rates of which one, of an arm at a position, is raised."""

    moved: tuple[int, int]
    step: float

    def of_slates(self, arms: Ints) -> Floats:
        h, arm = self.moved
        rates = super().of_slates(arms)
        rates[:, h] += self.step * (arms[:, h] == arm)
        return rates


@given(seed=seeds)
def test_the_leverage_of_answers_is_the_derivative_of_the_rates(seed: int) -> None:
    generator = np.random.default_rng(seed)
    displayed = generator.integers(1, 60, (3, 4)).astype(float)
    counts = AnswerCounts(displayed=displayed, answered=generator.uniform(0.1, 0.9, (3, 4)) * displayed)
    weights, step = generator.standard_normal((3, 4)), 1e-6

    def value(counts: AnswerCounts) -> float:
        return float((weights * counts.rates().of_arms(np.arange(4), 3)).sum())

    products = np.multiply.outer(counts.rates().positions, counts.rates().arms)
    assume(np.abs(products - 1).min() > 1e-4)  # the minimum of 1 and the product has no derivative there
    leverage = answer_leverage(counts, weights)
    for cell in np.ndindex(3, 4):
        answered = counts.answered.copy()
        answered[cell] += step
        found = (value(replace(counts, answered=answered)) - value(counts)) / step
        assert leverage[cell] == pytest.approx(found, abs=1e-6)


def test_leaving_is_learned_by_ad_and_position() -> None:
    scene = Scene(arms=3, horizon=3, leaving=0.25, choosy=True)
    sessions = scene.log(40_000, np.random.default_rng(0))
    every = np.arange(3)
    found = fitted(sessions).whole.rates.of_arms(every, 3)
    true = np.stack([scene.stays(np.full((1, 3), arm))[0] for arm in every], axis=1)
    np.testing.assert_allclose(found, true, atol=0.05)
    nobody = fitted(Scene().log(400, np.random.default_rng(0))).whole.rates
    assert nobody.are_all_one


def test_the_model_has_tastes_and_features_of_ads_if_serving_has() -> None:
    sessions = Scene(arms=4).log(400, np.random.default_rng(0))
    features = np.array([[0.0], [1.0], [0.0], [1.0]])
    described = fitted(sessions, personal=True, features=features).whole.clicks
    assert isinstance(described, PersonalModel)
    np.testing.assert_array_equal(described.precision.features[:, 1:], features)
    assert fitted(sessions, personal=True).whole.clicks != described


def test_the_error_of_later_positions_is_smaller() -> None:
    sessions = Scene(arms=4, horizon=3).log(300, np.random.default_rng(0))
    fit = fitted(sessions)
    whole, tail = model_error(fit, sessions), model_error(fit, sessions, after=2)
    assert 0 < tail.variance < whole.variance
    assert model_error(fit, sessions, after=3).variance == 0


@pytest.mark.parametrize("leaving", [0.0, 0.3])
@pytest.mark.parametrize("personal", [False, True], ids=["additive", "personal"])
def test_the_influences_of_all_sessions_sum_to_the_variance(personal: bool, leaving: float) -> None:
    """The information of the displays, and the spread of their contributions, give the same variance."""
    sessions = Scene(arms=4, horizon=3, leaving=leaving, choosy=True).log(4000, np.random.default_rng(0))
    error = model_error(fitted(sessions, personal=personal), sessions)
    assert (error.pulls**2).sum() == pytest.approx(error.variance, rel=0.1)
