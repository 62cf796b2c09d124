"""Cross-fitted click models, and the arms that they know."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from worker.bandit.additive import AdditiveModel
from worker.evaluate.estimators import direct
from worker.evaluate.model import fitted as one_model
from worker.evaluate.model import unseen
from worker.evaluate.support import LEAST_CLICKS, Unsupported

from .scenes import Scene, fitted


def test_a_model_needs_clicks() -> None:
    sessions = Scene(environment="rare").log(30, np.random.default_rng(0))
    assert sessions.clicked.sum() < LEAST_CLICKS
    with pytest.raises(Unsupported, match="clicks"):
        fitted(sessions)


def test_the_direct_method_needs_sessions() -> None:
    sessions, few = Scene().log(400, np.random.default_rng(0)), np.arange(400) < 29
    with pytest.raises(Unsupported, match="there are 29 sessions, 30 are needed"):
        direct(sessions.part(few), fitted(sessions).part(few), confidence=0.95)


def test_arms_that_no_session_has_seen_are_found_anywhere_or_at_their_positions() -> None:
    sessions = Scene(arms=12, share=0.0).log(600, np.random.default_rng(0))
    never = sorted(set(range(12)) - set(sessions.slates.ravel().tolist()))
    target = np.tile([sessions.slates[0, 0], never[0]], (600, 1))
    assert unseen(replace(sessions, target=target), anywhere=True) == 0.5
    first_only = replace(sessions, slates=np.full((600, 2), 3) - [0, 1], target=np.full((600, 2), 3))
    assert unseen(first_only, anywhere=True) == 0
    assert unseen(first_only, anywhere=False) == 0.5


def test_the_model_of_a_session_was_fitted_on_others() -> None:
    sessions = Scene().log(400, np.random.default_rng(0))
    before = fitted(sessions)
    fold = before.folds == 2
    after = fitted(replace(sessions, clicked=np.where(fold, ~sessions.clicked, sessions.clicked)))
    np.testing.assert_array_equal(before.values[fold], after.values[fold])
    assert (before.values[~fold, 0] != after.values[~fold, 0]).all()
    np.testing.assert_array_equal(before.values[fold, 0], before.by_model[2][fold])


def test_leaving_is_learned_by_ad_and_position() -> None:
    scene = Scene(arms=3, horizon=3, leaving=0.25, choosy=True)
    prior, every = AdditiveModel.prior(dim=3, arms=3, ridge=1.0, intercept=True), np.arange(3)
    found = one_model(scene.log(40_000, np.random.default_rng(0)), prior)[1].of_arms(every, 3)
    true = np.stack([scene.stays(np.full((1, 3), arm))[0] for arm in every], axis=1)
    np.testing.assert_allclose(found, true, atol=0.05)
    assert one_model(Scene().log(400, np.random.default_rng(0)), prior)[1].are_all_one
