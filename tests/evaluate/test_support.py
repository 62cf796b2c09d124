"""Probabilities of slates, importance weights, the support of a log for a target, and what would suffice for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.bandit.policies import EpsilonGreedy
from worker.evaluate.estimators import METHODS
from worker.evaluate.sessions import Rule, Sessions
from worker.evaluate.support import LEAST_CLICKS, LEAST_SESSIONS, MARGIN, Unsupported, sufficient, support

from .scenes import KINDS, Scene, answer, fitted, scenes, seeds, weighted


@settings(deadline=None, max_examples=50)
@given(scenes, st.integers(0, 3))
def test_the_probabilities_of_all_slates_sum_to_one(scene: Scene, excluding: int) -> None:
    scene = replace(scene, arms=4, excluding=excluding)
    rule = replace(scene.rules(np.arange(KINDS))["served"], epsilon=np.full(KINDS, scene.epsilon))
    total = sum(
        np.where(possible, rule.chances(s, eligible)[:, -1], 0.0) for s, possible, eligible in scene.every_slate()
    )
    np.testing.assert_allclose(total, 1.0, rtol=1e-12)


@settings(deadline=None, max_examples=50)
@given(seeds, st.booleans(), st.floats(0.01, 1))
def test_the_probability_of_a_slate_is_its_propensity_in_serving(seed: int, repeats: bool, epsilon: float) -> None:
    scene = Scene(arms=4, horizon=3, repeats=repeats, epsilon=epsilon, seed=seed % 1000)
    uniforms = np.random.default_rng(seed).random((KINDS, 3, 2))
    drawn = EpsilonGreedy(epsilon=epsilon).slates(scene.planner(1), scene.contexts(), uniforms=uniforms)
    rule: Rule = scene.rules(np.arange(KINDS))["target"]
    eligible = np.full((KINDS, 3), 4) if repeats else np.tile([4, 3, 2], (KINDS, 1))
    np.testing.assert_allclose(rule.steps(drawn.arms, eligible), drawn.propensities, rtol=1e-12)


@pytest.mark.parametrize(
    ("scene", "count", "method", "reason"),
    [
        (Scene(share=0.0), 400, "replay", "no session was drawn uniformly"),
        (Scene(share=0.0), 400, "ips", "the first position has 0.0 effective sessions"),
        (Scene(), 40, "ips", "the first position has"),
        (Scene(environment="rare", horizon=1), 200, "snips", "effective clicks"),
        (Scene(horizon=5), 1500, "ips", "position 4 has"),
        (Scene(horizon=5), 1500, "replay", "revenue from there on may be up to"),
    ],
)
def test_an_estimator_refuses_without_support(scene: Scene, count: int, method: str, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        answer(scene, count, method)


def test_without_sessions_there_is_no_support() -> None:
    sessions = Scene().log(10, np.random.default_rng(0))
    with pytest.raises(Unsupported, match="is deterministic"):
        support(sessions.part(np.zeros(10, dtype=bool)))


def test_support_is_judged_by_expected_and_not_by_observed_weights() -> None:
    """Observed weights look good if the heavy ones happen to be absent."""
    scene = Scene(share=0.02, off=1.5)
    sessions = scene.log(1000, np.random.default_rng(0))
    lucky = sessions.part(~sessions.drawn)  # as if the lottery had drawn no session
    used = weighted(lucky).weights[:, 0]
    assert used.sum() ** 2 / (used**2).sum() > 2 * LEAST_SESSIONS
    with pytest.raises(Unsupported, match="effective sessions"):
        support(lucky)


def test_positions_without_support_raise_the_upper_end_alone() -> None:
    """Most users leave or click at each position, so that the last positions matter little."""
    scene = Scene(environment="uniform", horizon=4, leaving=0.5)
    found = answer(scene, 12_000, "ips")
    assert found.revenue is not None
    assert 1 <= found.positions < 4
    assert 0 < found.beyond <= 0.1 * found.revenue.estimate
    assert found.revenue.high - found.revenue.estimate > found.beyond
    assert found.revenue.low < scene.truth() < found.revenue.high


def test_an_estimate_has_the_size_of_its_support() -> None:
    found = answer(Scene(), 1500, "ips")
    assert found.sessions == 1500
    assert found.matching is not None
    assert 0 < found.matching < 1500
    assert len(found.effective) == 2
    assert found.effective[0] == pytest.approx(500)
    assert found.clicks is not None
    assert found.clicks >= LEAST_CLICKS


# ── what would suffice ────────────────────────────────────────────────────────────────────────────────────────────────

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
