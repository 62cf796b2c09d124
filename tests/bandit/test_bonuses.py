"""How much to explore: the bonus of an uncertain arm, the budget and the radius, compared with their formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.arrays import sigmoid
from worker.bandit.bonuses import BONUSES, CURVE, Spread, explore_budget, restarted, theory_radius

from .beliefs import lawful
from .reference import curve, logistic

Floats = NDArray[np.float64]


@given(
    st.lists(st.tuples(st.floats(-30, 30), st.floats(0, 60), st.floats(-1, 2)), min_size=1, max_size=10),
)
@lawful
def test_the_curve_bonus_is_its_formula(arms: list[tuple[float, float, float]]) -> None:
    odds, widths, gains = np.array(arms).T
    chances = np.asarray(logistic(odds), dtype=float)
    slopes = CURVE.slopes(chances, CURVE.prepared(widths))  # type: ignore[attr-defined]
    actual = widths * slopes * np.maximum(gains, 0)
    # 1 − f has lost digits where f is close to 1.
    expected = curve(odds, widths, gains)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14 * (1 + widths.max()))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("chance", [0.0, 1e-45, 1e-38, 1e-30, 1e-9, 0.5, 1 - 1e-7, 1.0])
@pytest.mark.parametrize("width", [0.0, 1e-30, 1.0, 80.0, 1e4, 1e30])
def test_extreme_probabilities_and_widths_give_a_finite_bonus(dtype: Any, chance: float, width: float) -> None:
    chances, widths = np.array([[chance]], dtype=dtype), np.array([[width]], dtype=dtype)
    slope = CURVE.slopes(chances, CURVE.prepared(widths))  # type: ignore[attr-defined]
    assert slope.dtype == dtype
    assert np.isfinite(slope).all()
    assert 0 <= slope.item() <= 0.2501
    raised = CURVE.raised(chances, widths, None)
    scores = CURVE.scores(np.ones((1, 1), dtype=dtype), chances, raised, leaving=False)
    assert np.isfinite(scores).all()
    hopeful = CURVE.optimistic(np.log(np.maximum(chances, 1e-45)), widths)
    assert ((hopeful >= 0) & (hopeful <= 1)).all()


def test_an_arm_wrongly_thought_hopeless_has_a_bonus_that_the_slope_at_the_estimate_does_not_give() -> None:
    chances, widths = sigmoid(np.array([-12.0])), np.array([12.0])
    curve, value = (BONUSES[name].raised(chances, widths, None) - chances for name in ("curve", "value"))
    assert curve.item() > 100 * value.item()


def test_spread_factors_are_even_around_one_and_each_session_has_its_own() -> None:
    keys, arms = np.arange(2000, dtype=np.uint32), np.arange(5, dtype=np.uint32)
    for share in (0.2, 1.0):
        factors = Spread(share=share, keys=keys).factors(slice(0, 2000), arms, np.float64)
        ranks = (np.sort(factors, axis=0) - 1) / share + 0.5  # a uniform sample: the k-th of n is at k/n
        assert np.abs(ranks - ((np.arange(2000) + 0.5) / 2000)[:, None]).max() < 0.05
        assert np.abs(np.corrcoef(factors.T) - np.eye(5)).max() < 0.08
        shares = np.bincount(factors.argmax(axis=1), minlength=5) / 2000
        assert np.abs(shares - 0.2).max() < 0.04  # what is equal is shared out
        # A session that repeats arms does not try one of them at all positions.
        firsts = [Spread(share=share, keys=keys).factors(slice(0, 2000), arms, np.float64, h) for h in range(5)]
        tried = np.stack([factors.argmax(axis=1) for factors in firsts])
        assert np.mean([len(set(column)) for column in tried.T.tolist()]) > 3


def test_the_clock_restarts_in_proportion_to_what_is_new_and_never_runs_ahead() -> None:
    for share in (0.05, 0.5, 1.0):
        clock = restarted(500.0, share, 300)
        assert explore_budget(10_000, clock, 300) == pytest.approx(10_000 * share, abs=1)
        assert restarted(clock / 2, share, 300) == clock / 2
    assert restarted(500.0, 0.0, 300) == 500.0


# ── the budget and the radius ────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 10_000), st.integers(0, 5000), st.integers(2, 10_000))
@lawful
def test_the_budget_falls_from_everyone_to_one(users: int, t: int, episodes: int) -> None:
    budget = explore_budget(users, t, episodes)
    assert explore_budget(users, 0, episodes) == max(1, users)
    assert 1 <= budget <= max(1, users)
    assert explore_budget(users, t + 1, episodes) <= budget
    assert budget == 1 or budget <= users * math.exp(-t / math.log(episodes)) < budget + 1


def test_the_radius_is_the_theorem_s_and_above_zero_before_the_first_display() -> None:
    size: dict[str, Any] = {"dim": 5, "arms": 10, "largest_reward": 3.0, "largest_norm": 4.0, "ridge": 1.0}
    kappa = math.sqrt(3 + 2 * math.log(1 + 16 / 8))
    expected = kappa * 3 * 4 * math.sqrt(2 * 15 * math.log(1000) * math.log(15 / 0.05))
    assert theory_radius(**size, displays=1000) == pytest.approx(expected, rel=1e-14)
    assert theory_radius(**size, displays=0) == theory_radius(**size, displays=2) > 0
