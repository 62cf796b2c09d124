"""Importance weights, and the support of a log for a target."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from worker.evaluate.estimators import snips
from worker.evaluate.sessions import Sessions
from worker.evaluate.support import LEAST_CLICKS, LEAST_SESSIONS, Unsupported, weigh

from .scenes import Scene


def unknown(sessions: Sessions) -> Sessions:
    """Sessions of which the probability of other slates than those shown is not known."""
    return replace(sessions, target_chances=np.full(sessions.chances.shape, np.nan))


@pytest.mark.parametrize(
    ("scene", "count", "reason"),
    [
        (Scene(), 40, r"the first position has 1\d.\d effective sessions, 30 are needed: more sessions, and a random_"),
        (Scene(environment="rare", horizon=1), 200, "effective clicks, 10 are needed: more sessions"),
        (Scene(horizon=5), 1500, "position 4 has too few sessions, and the revenue from there on may be up to"),
    ],
)
def test_too_little_support_is_no_answer(scene: Scene, count: int, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        snips(weigh(scene.log(count, np.random.default_rng(0))), confidence=0.95)


def test_without_sessions_there_is_no_support() -> None:
    sessions = Scene().log(10, np.random.default_rng(0))
    with pytest.raises(Unsupported, match="no slate was left to chance, and another policy served: more sessions, and"):
        weigh(sessions.part(np.zeros(10, dtype=bool)))


def test_weights_that_look_good_because_the_heavy_ones_are_absent_are_no_support() -> None:
    sessions = Scene(share=0.02, off=1.5).log(1000, np.random.default_rng(0))
    lucky = sessions.part(~sessions.drawn)  # as if the lottery had drawn no session
    used = (lucky.target == lucky.slates)[:, 0] / lucky.chances[:, 0]
    assert used.sum() ** 2 / (used**2).sum() > 2 * LEAST_SESSIONS
    with pytest.raises(Unsupported, match="effective sessions"):
        weigh(lucky)
    with pytest.raises(Unsupported, match=r"position 1 have the mean 0\.\d\d in place of 1: the log lacks sessions"):
        weigh(unknown(lucky))


def test_recorded_propensities_are_weighed_as_known_ones_and_wrong_ones_are_noticed() -> None:
    sessions = Scene().log(2000, np.random.default_rng(0))
    known, recorded = weigh(sessions), weigh(unknown(sessions))
    np.testing.assert_array_equal(recorded.weights, known.weights)
    assert recorded.clicks == pytest.approx(known.clicks, rel=0.15)
    with pytest.raises(Unsupported, match=r"the mean 1\.\d\d in place of 1"):
        weigh(unknown(replace(sessions, chances=0.7 * sessions.chances)))


def test_positions_without_support_raise_the_upper_end_alone() -> None:
    """Most users leave or click at each position, so that the last positions matter little."""
    scene = Scene(environment="uniform", horizon=4, leaving=0.5)
    found = snips(weigh(scene.log(12_000, np.random.default_rng(0))), confidence=0.95)
    assert found.revenue is not None
    assert 1 <= found.positions < 4
    low, middle, high = found.revenue.low, found.revenue.estimate, found.revenue.high
    assert high - middle > 1.5 * (middle - low)
    assert low < scene.truth() < high


def test_an_answer_has_the_size_of_its_support() -> None:
    found = snips(weigh(Scene().log(1500, np.random.default_rng(0))), confidence=0.95)
    assert found.sessions == 1500
    assert found.matching is not None
    assert 0 < found.matching < 1500
    assert found.clicks is not None
    assert LEAST_CLICKS <= found.clicks < 1500
    assert (found.positions, found.of_positions) == (2, 2)
