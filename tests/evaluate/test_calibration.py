"""The check of the click model on random sessions, against worlds in which the model is right and wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import Floats, Ints, sigmoid
from worker.evaluate.calibration import TARGET, ModelCheck, check_model
from worker.evaluate.estimators import METHODS
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


def checked(scene: Scene, count: int = 4000) -> tuple[ModelCheck, bool]:
    """Return the check of a log, and whether the interval of `direct` contains the truth."""
    log = scene.log(count, np.random.default_rng(scene.seed + 100))
    fit = fitted(log)
    found = METHODS["direct"].estimate(log, fit, confidence=0.95).revenue
    assert found is not None
    return check_model(log, fit, confidence=0.95), found.low <= scene.truth() <= found.high


def test_where_the_model_is_wrong_direct_is_never_wrong_without_a_warning() -> None:
    found = [checked(Interacting(seed=seed)) for seed in range(LOGS)]
    assert sum(covers for _, covers in found) < LOGS  # else there were nothing to warn of
    assert [check.passed for check, covers in found if not covers] == [False] * sum(not covers for _, covers in found)
    assert all("WARNING: the click model is wrong" in doubts(check)[0] for check, _ in found if not check.passed)


def test_where_the_model_is_right_there_is_no_warning() -> None:
    found = [checked(Interacting(seed=seed, strength=0.0))[0] for seed in range(LOGS)]
    assert [check.passed for check in found] == [True] * LOGS
    assert all(doubts(check) == [] for check in found)


def test_a_click_rate_that_falls_with_the_position_is_learned_and_found_in_a_model_without_positions() -> None:
    log = Interacting(strength=0.0, fading=0.7).log(4000, np.random.default_rng(5))
    assert check_model(log, fitted(log), confidence=0.95).passed
    plain = AdditiveModel.prior(dim=3, arms=4, ridge=0.1, intercept=False)
    without = cross_fit(log, prior=plain, generator=np.random.default_rng(0))
    assert "position 3" in [group.group for group in check_model(log, without, confidence=0.95).failed]


def test_groups_have_their_displays_clicks_and_intervals() -> None:
    scene = Interacting(strength=0.0)
    log = scene.log(4000, np.random.default_rng(5))
    check = check_model(log, fitted(log), confidence=0.95)
    groups = {group.group: group for group in check.groups}
    assert check.sessions == log.drawn.sum()
    everything = groups["all displays"]
    assert everything.displays == log.displayed[log.drawn].sum()
    assert everything.clicks == log.clicked[log.drawn].sum()
    assert everything.revenue == pytest.approx(log.earned[log.drawn].sum())
    assert everything.displays == sum(groups[f"position {h}"].displays for h in (1, 2, 3))
    assert groups[TARGET].displays < everything.displays
    assert all(group.low < group.ratio < group.high for group in check.groups)


def test_few_random_sessions_are_not_enough() -> None:
    check, _ = checked(Interacting(share=0.005), count=1000)
    assert check.passed is None
    assert "not enough random sessions to check the click model" in doubts(check)[0]
