"""The check of the click model on random sessions, against worlds in which the model is right and wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import Floats, Ints, sigmoid
from worker.evaluate.calibration import ModelCheck, check_model
from worker.evaluate.estimators import direct
from worker.evaluate.evaluation import doubts
from worker.evaluate.model import cross_fit

from .scenes import Scene, fitted

LOGS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Interacting(Scene):
    """A world in which half of the ads appeal to some users and half to others; an additive model cannot fit it."""

    environment: str = "uniform"
    arms: int = 4
    horizon: int = 3
    share: float = 0.3
    strength: float = 0.75

    def chances(self, contexts: Floats, slates: Ints) -> Floats:
        odds = self.world().truth.log_odds_of(contexts, slates)
        odds = odds - self.fading * np.arange(slates.shape[1])
        return sigmoid(odds + self.strength * np.where(slates % 2 == 0, 1, -1) * contexts[:, :1])


def checked(scene: Scene, count: int = 4000, *, personal: bool = True) -> tuple[ModelCheck, bool]:
    """Return the check of a log, and whether the interval of `direct` contains the truth."""
    log = scene.log(count, np.random.default_rng(scene.seed + 100))
    fit = fitted(log, personal=personal)
    found = direct(log, fit, confidence=0.95).revenue
    assert found is not None
    return check_model(log, fit), found.low <= scene.truth() <= found.high


def test_the_personal_model_is_right_where_an_additive_one_is_not() -> None:
    personal = [checked(Interacting(seed=seed)) for seed in range(LOGS)]
    assert sum(covers for _, covers in personal) >= LOGS - 1
    assert [check.passed for check, _ in personal] == [True] * LOGS
    additive = [checked(Interacting(seed=seed), personal=False)[1] for seed in range(LOGS)]
    assert sum(additive) < LOGS - 2


def test_where_the_model_is_right_there_is_no_warning() -> None:
    found = [checked(Interacting(seed=seed, strength=0.0))[0] for seed in range(LOGS)]
    assert [check.passed for check in found] == [True] * LOGS
    assert all(doubts(check) == [] for check in found)


def test_a_model_that_lacks_what_matters_is_found_on_random_sessions() -> None:
    """Users click less at later positions, where random sessions show what the target shows first."""
    log = Interacting(strength=0.0, fading=1.5).log(4000, np.random.default_rng(5))
    assert check_model(log, fitted(log)).passed
    plain = AdditiveModel.prior(dim=3, arms=4, ridge=1000.0, intercept=False)
    check = check_model(log, cross_fit(log, plain))
    assert check.passed is False
    assert "WARNING: the click model is wrong on random sessions (all displays: observed / exp" in doubts(check)[0]


def test_groups_have_their_displays_and_clicks() -> None:
    log = Interacting(strength=0.0).log(4000, np.random.default_rng(5))
    check = check_model(log, fitted(log))
    everything, wanted = check.groups
    assert check.sessions == log.drawn.sum()
    assert everything.displays == log.displayed[log.drawn].sum() > wanted.displays
    assert everything.clicks == log.clicked[log.drawn].sum()
    assert everything.ratio == pytest.approx(1, abs=0.2)


def test_few_random_sessions_are_not_enough() -> None:
    check, _ = checked(Interacting(share=0.005), count=1000)
    assert check.passed is None
    assert "not enough random sessions to check the click model" in doubts(check)[0]
