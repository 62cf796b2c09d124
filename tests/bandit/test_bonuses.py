"""The bonus of an uncertain arm, compared with its formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.arrays import NO_ARM, sigmoid
from worker.bandit.bonuses import BONUSES, CURVE
from worker.bandit.planning import Planner

from .beliefs import belief, excluded_arms, lawful, probabilities, seeds
from .reference import logistic
from .tastes import taste

Floats = NDArray[np.float64]


def curve(odds: Floats, widths: Floats, gains: Floats) -> Floats:
    """Return β·width·sqrt(f(1−f)·f⁺(1−f⁺))·max(e − V, 0), in extended precision; widths are β·width."""
    low, high = logistic(odds), logistic(odds + widths.astype(np.longdouble))
    against = logistic(-odds), logistic(-(odds + widths.astype(np.longdouble)))
    slope = np.sqrt(low * against[0] * high * against[1])
    return np.asarray(widths * slope * np.maximum(gains, 0), dtype=np.float64)


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


@pytest.mark.parametrize("kind", [belief, taste])
@given(seeds, st.integers(1, 3), st.integers(1, 10), st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.5, 40.0]))
@lawful
def test_the_optimistic_arm_under_the_curve_bonus_is_the_argmax_of_the_formula(kind, seed, dim, arms, horizon, beta):
    generator = np.random.default_rng(seed)
    planner = Planner(kind(dim, arms, generator), generator.uniform(0.1, 1, arms), horizon=horizon, dtype=np.float64)
    contexts = generator.normal(size=(3, dim))
    excluded = excluded_arms(generator, arms, 0.0, 0.3, 0.9)
    masked = planner.masked(excluded)
    plan = planner.greedy(contexts, masked)
    chosen = planner.optimistic(contexts, plan.continuations, beta=beta, bonus=CURVE, masked=masked)
    f, odds = probabilities(planner.model, contexts), planner.model.log_odds(contexts)
    widths = beta * planner.model.widths(contexts)
    for h in range(horizon):
        gains = planner.rewards - plan.continuations[:, h + 1 : h + 2]
        table = f * gains + curve(odds, widths, gains)
        for row, arm in enumerate(chosen[:, h].tolist()):
            eligible = [k for k in range(arms) if k not in excluded[row]]
            assert (arm == NO_ARM) == (not eligible)
            if eligible:
                assert table[row, arm] >= table[row, eligible].max() - 1e-12
