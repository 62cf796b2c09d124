"""Probabilities of slates, importance weights, and the support of a log for a target."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.bandit.policies import EpsilonGreedy
from worker.evaluate.sessions import Rule
from worker.evaluate.support import LEAST_CLICKS, LEAST_SESSIONS, Unsupported, support

from .scenes import KINDS, Scene, answer, scenes, seeds, weighted


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


@settings(deadline=None, max_examples=60)
@given(scenes)
def test_weights_of_fewer_displays_vary_less(scene: Scene) -> None:
    """Weights of the whole slate, of the displays up to the click, and of these with the lottery averaged out."""
    sessions, chances = scene.every_session()
    found = weighted(sessions)
    rewards = found.sessions.rewards
    by_decision = (found.weights * rewards).sum(axis=1)
    whole_slate = (found.weights[:, -1:] * rewards).sum(axis=1)
    mean = (chances * by_decision).sum()
    assert (chances * whole_slate).sum() == pytest.approx(mean)
    assert (chances * by_decision**2).sum() <= (chances * whole_slate**2).sum() * (1 + 1e-9)
    # The drawn sessions alone: a slate was drawn with its probability under the uniform part of the lottery.
    uniformly = replace(sessions.served, uniform=np.ones(len(sessions)))
    served, target, uniform = (
        np.take_along_axis(rule.chances(sessions.slates, sessions.eligible), sessions.displayed[:, None] - 1, axis=1)[
            :, 0
        ]
        for rule in (sessions.served, sessions.target, uniformly)
    )
    squares = (target / uniform / scene.share * sessions.earned) ** 2
    assert (chances * by_decision**2).sum() <= (chances * uniform * scene.share / served * squares).sum() * (1 + 1e-9)


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
