"""The share of random sessions, and the number of sessions, that suffice for an answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from worker.evaluate.estimators import METHODS
from worker.evaluate.sessions import Sessions
from worker.evaluate.sufficiency import MARGIN, sufficient
from worker.evaluate.support import LEAST_CLICKS, LEAST_SESSIONS, Unsupported

from .scenes import Scene, fitted

#: Few sessions, and a target that often differs from what was served.
SCENE = Scene(environment="uniform", arms=4, horizon=2, share=0.01, off=1.5)
COUNT = 3000


def asked(method: str) -> dict[str, bool]:
    return {"first_position": METHODS[method].needs_model, "drawn_only": method == "replay"}


def answers(method: str, log: Sessions) -> bool:
    try:
        METHODS[method].estimate(log, fitted(log) if METHODS[method].needs_model else None, confidence=0.95)
    except Unsupported:
        return False
    return True


@pytest.mark.parametrize("method", ["replay", "ips", "snips", "dr"])
@pytest.mark.parametrize("seed", [3, 5])
def test_the_share_and_the_number_of_sessions_suffice(method: str, seed: int) -> None:
    scene = replace(SCENE, seed=seed)
    log = scene.log(COUNT, np.random.default_rng(seed))
    found = sufficient(log, **asked(method))
    assert found.share is not None
    assert found.sessions is not None
    assert answers(method, replace(scene, share=found.share).log(COUNT, np.random.default_rng(seed + 1)))
    assert answers(method, scene.log(int(found.sessions), np.random.default_rng(seed + 2)))
    text = str(found)
    assert f"random_share = {found.share:.2g} would suffice" in text
    assert "sessions at 0.01" in text


def test_for_a_target_that_agrees_nowhere_it_is_the_formula() -> None:
    """Random sessions: n ρ ≥ K^h max(30 / P(reach h), 10 / P(click up to h))."""
    log = SCENE.log(COUNT, np.random.default_rng(0))
    other = (log.served.best + 1) % SCENE.arms
    log = replace(log, target=replace(log.target, best=other), target_slates=other[None])
    reach, clicked = log.reached.mean(axis=0), np.cumsum((log.rewards > 0).mean(axis=0))
    least = np.maximum(LEAST_SESSIONS / reach, LEAST_CLICKS / clicked) * SCENE.arms ** np.array([1, 2])
    for method, wanted in (("ips", least.max()), ("replay", least.max()), ("dr", least[0])):
        found = sufficient(log, **asked(method))
        assert found.sessions == pytest.approx(MARGIN * wanted / SCENE.share)


def test_many_ads_and_positions_need_more_sessions_than_there_are() -> None:
    scene = replace(SCENE, arms=8, horizon=4)
    found = sufficient(scene.log(500, np.random.default_rng(0)), first_position=False, drawn_only=True)
    assert found.share is None
    assert str(found).startswith("no random_share suffices for so many sessions: it takes ")


def test_a_log_without_chance_gets_a_share_too() -> None:
    log = replace(SCENE, share=0.0).log(COUNT, np.random.default_rng(0))
    found = sufficient(log, first_position=True, drawn_only=False)
    assert found.sessions is None
    assert found.share is not None
