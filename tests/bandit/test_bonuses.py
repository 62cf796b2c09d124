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
from worker.bandit.bonuses import BONUSES, CURVE, explore_budget, theory_radius
from worker.errors import InputError

from .beliefs import lawful
from .reference import curve, logistic

Floats = NDArray[np.float64]


@given(
    st.lists(st.tuples(st.floats(-30, 30), st.floats(0, 60), st.floats(-1, 2)), min_size=1, max_size=10),
)
@lawful
def test_the_curve_bonus_is_its_formula(arms: list[tuple[float, float, float]]) -> None:
    odds, widths, gains = np.array(arms).T
    actual = CURVE.of(np.asarray(logistic(odds), dtype=float), widths, gains)
    # 1 − f has lost digits where f is close to 1.
    expected = curve(odds, widths, gains)
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14 * (1 + widths.max()))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("chance", [0.0, 1e-45, 1e-38, 1e-30, 1e-9, 0.5, 1 - 1e-7, 1.0])
@pytest.mark.parametrize("width", [0.0, 1e-30, 1.0, 80.0, 1e4, 1e30])
def test_extreme_probabilities_and_widths_give_a_finite_bonus(dtype: Any, chance: float, width: float) -> None:
    chances, widths = np.array([[chance]], dtype=dtype), np.array([[width]], dtype=dtype)
    slope = CURVE.slopes(chances, widths)  # type: ignore[attr-defined]
    assert slope.dtype == dtype
    assert np.isfinite(slope).all()
    assert 0 <= slope.item() <= 0.2501
    ahead = np.zeros((1, 2), dtype=dtype)
    (scores,) = CURVE.scores(chances, widths.copy(), np.ones(1, dtype=dtype), ahead)
    assert np.isfinite(scores).all()
    hopeful = CURVE.optimistic(np.log(np.maximum(chances, 1e-45)), widths)
    assert ((hopeful >= 0) & (hopeful <= 1)).all()


def test_an_arm_wrongly_thought_hopeless_has_a_bonus_that_the_slope_at_the_estimate_does_not_give() -> None:
    chances, widths, gains = sigmoid(np.array([-12.0])), np.array([12.0]), np.ones(1)
    assert CURVE.of(chances, widths, gains).item() > 100 * BONUSES["value"].of(chances, widths, gains).item()


# ── the budget and the radius ────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 10_000), st.integers(0, 5000), st.integers(2, 10_000))
@lawful
def test_the_budget_falls_from_everyone_to_one(users: int, t: int, episodes: int) -> None:
    budget = explore_budget(users, t, episodes)
    assert explore_budget(users, 0, episodes) == max(1, users)
    assert 1 <= budget <= max(1, users)
    assert explore_budget(users, t + 1, episodes) <= budget
    assert budget == 1 or budget <= users * math.exp(-t / math.log(episodes)) < budget + 1
    with pytest.raises(InputError, match="at least 2"):
        explore_budget(users, t, 1)


def test_the_radius_is_the_theorem_s_and_above_zero_before_the_first_display() -> None:
    size: dict[str, Any] = {"dim": 5, "arms": 10, "largest_reward": 3.0, "largest_norm": 4.0, "ridge": 1.0}
    kappa = math.sqrt(3 + 2 * math.log(1 + 16 / 8))
    expected = kappa * 3 * 4 * math.sqrt(2 * 15 * math.log(1000) * math.log(15 / 0.05))
    assert theory_radius(**size, displays=1000) == pytest.approx(expected, rel=1e-14)
    assert theory_radius(**size, displays=0) == theory_radius(**size, displays=2) > 0
