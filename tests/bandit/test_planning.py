"""Planning with repeats, compared with every possible slate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from worker.bandit.additive import AdditiveModel
from worker.bandit.arrays import NO_ARM
from worker.bandit.bonuses import BONUSES
from worker.bandit.estimators import ByArm
from worker.bandit.planning import Optimism, Planner, optimal_values
from worker.bandit.precision import Precision
from worker.errors import InputError

from .beliefs import excluded_arms, lawful, planner_of, probabilities, seeds
from .reference import curve, logistic, slate_value, squared_widths

Floats = NDArray[np.float64]


def backwards(
    chances: Floats, rewards: Floats, horizon: int, eligible: list[int]
) -> tuple[list[list[int]], list[float]]:
    """Return, per step, the arms that attain the maximum of Q_h, and V_1 … V_{H+1}, by the paper's Algorithm."""
    ahead, best, values = 0.0, [], [0.0]
    for _ in range(horizon):
        q = {k: chances[k] * rewards[k] + (1 - chances[k]) * ahead for k in eligible}
        ahead = max(q.values(), default=0.0)
        best.append([k for k in eligible if q[k] >= ahead - 1e-9])
        values.append(ahead)
    return best[::-1], values[::-1]


# ── the best slate ───────────────────────────────────────────────────────────────────────────────────────────────────


@given(seeds, st.integers(1, 3), st.integers(1, 60), st.integers(1, 6), st.data())
@lawful
def test_each_choice_attains_the_maximum_whatever_is_excluded_or_retired(seed, dim, arms, horizon, data) -> None:
    active = data.draw(st.lists(st.booleans(), min_size=arms, max_size=arms))
    planner, generator = planner_of(seed, arms, horizon, dim=dim, active=active)
    contexts = generator.normal(size=(4, dim))
    share = data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    excluded = excluded_arms(generator, arms, *[share] * 4)
    plan = planner.plan(contexts, planner.masked(excluded))
    for row, chances in enumerate(probabilities(planner.model, contexts)):
        eligible = [k for k in range(arms) if active[k] and k not in excluded[row]]
        best, values = backwards(chances, planner.rewards, horizon, eligible)
        np.testing.assert_allclose(plan.continuations[row], values, rtol=0, atol=1e-12)
        if not eligible:
            assert (plan.arms[row] == NO_ARM).all()
        else:
            assert all(arm in tied for arm, tied in zip(plan.arms[row].tolist(), best, strict=True))


def test_the_paper_s_unimodality_is_false_so_every_arm_is_looked_at() -> None:
    # Erratum: f = (0.9, 0.3, 0.29), e = (1, 1.5, 3) gives Q = (0.9, 0.45, 0.87), which a ternary search gets wrong.
    chances, rewards = np.array([0.9, 0.3, 0.29]), np.array([1.0, 1.5, 3.0])
    q = chances * rewards
    assert q.tolist() == pytest.approx([0.9, 0.45, 0.87])
    assert q[0] > q[1] < q[2]
    known = AdditiveModel.certain(np.zeros(1), np.log(chances / (1 - chances)))
    plan = Planner(known, rewards, horizon=1, dtype=np.float64).plan(np.zeros((1, 1)))
    assert plan.arms.tolist() == [[0]]
    assert plan.continuations[0, 0] == pytest.approx(0.9)


@given(seeds, st.integers(2, 12), st.integers(1, 8))
@lawful
def test_expensive_unlikely_arms_come_first_when_revenue_and_probability_are_opposite(seed, arms, horizon) -> None:
    # Erratum to Proposition 2: with arms by rising revenue and falling probability, k*_1 ≥ … ≥ k*_H.
    generator = np.random.default_rng(seed)
    known = AdditiveModel.certain(np.zeros(1), np.sort(generator.normal(size=arms))[::-1])
    planner = Planner(known, np.sort(generator.uniform(0.1, 3, arms)), horizon=horizon, dtype=np.float64)
    slate = planner.plan(np.zeros((1, 1))).arms[0]
    assert (np.diff(slate) <= 0).all()


# ── the optimistic arm ───────────────────────────────────────────────────────────────────────────────────────────────


def scores(planner: Planner, contexts: Floats, ahead: Floats, beta: float, bonus: str) -> Floats:
    """Return Q_h(k) + bonus of every arm as docs/math.md §3 writes it, for V_{h+1} = ahead: (n, K)."""
    f = np.asarray(logistic(planner.model.log_odds(contexts)), dtype=float)
    width = np.sqrt(squared_widths(planner.model.precision, contexts))
    q = f * planner.rewards + (1 - f) * ahead[:, None]
    if bonus == "paper":
        return np.asarray(q + beta * width)
    if bonus == "curve":
        return q + curve(planner.model.log_odds(contexts), beta * width, planner.rewards - ahead[:, None])
    return np.asarray(q + beta * width * f * (1 - f) * np.maximum(planner.rewards - ahead[:, None], 0))


@given(
    seeds, st.integers(1, 4), st.integers(1, 12), st.integers(1, 4), st.sampled_from([0.0, 0.3, 1.5, 40.0]), st.data()
)
@lawful
def test_the_optimistic_arm_is_the_argmax_of_the_formula(seed, dim, arms, horizon, beta, data) -> None:
    bonus = data.draw(st.sampled_from(list(BONUSES)))
    active = data.draw(st.lists(st.booleans(), min_size=arms, max_size=arms))
    planner, generator = planner_of(seed, arms, horizon, dim=dim, active=active)
    contexts = generator.normal(size=(3, dim))
    excluded = excluded_arms(generator, arms, 0.3, 0.3, 0.3)
    masked = planner.masked(excluded)
    plan = planner.plan(contexts, masked, Optimism(beta=beta, bonus=BONUSES[bonus]))
    for h in range(horizon):
        table = scores(planner, contexts, plan.continuations[:, h + 1], beta, bonus)
        for row, arm in enumerate(plan.optimistic[:, h].tolist()):
            eligible = [k for k in range(arms) if active[k] and k not in excluded[row]]
            if not eligible:
                assert arm == NO_ARM
            else:
                assert arm in eligible
                assert table[row, arm] >= table[row, eligible].max() - 1e-10


# ── single precision ─────────────────────────────────────────────────────────────────────────────────────────────────


@given(seeds, st.integers(1, 8), st.integers(1, 60), st.integers(1, 6), st.sampled_from(["value", "paper"]))
@lawful
def test_single_precision_chooses_as_double_does_near_ties_aside(seed, dim, arms, horizon, bonus) -> None:
    double, generator = planner_of(seed, arms, horizon, dim=dim)
    single = Planner(double.model, double.rewards, horizon=horizon)
    contexts = 2 * generator.normal(size=(8, dim))
    plan = double.plan(contexts)
    rough = single.plan(contexts, optimism=Optimism(beta=1.5, bonus=BONUSES[bonus]))
    np.testing.assert_allclose(rough.continuations, plan.continuations, rtol=1e-5, atol=1e-7)
    for h in range(horizon):
        for beta, chosen in ((0.0, rough.arms[:, h]), (1.5, rough.optimistic[:, h])):
            table = scores(double, contexts, plan.continuations[:, h + 1], beta, bonus)
            best = table.max(axis=1)
            assert (best - table[np.arange(8), chosen] <= 1e-5 * best).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(
    st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=6),
    st.lists(st.floats(-500, 500), min_size=1, max_size=6),
    st.integers(1, 4),
)
@lawful
def test_steep_odds_stay_finite_and_right(dtype: Any, offsets: list[float], theta: list[float], horizon: int) -> None:
    known = AdditiveModel.certain(np.ones(1), np.array(theta))
    planner = Planner(known, np.linspace(1, 2, len(theta)), horizon=horizon, dtype=dtype)
    contexts = np.array(offsets)[:, None]
    odds = contexts + known.theta_arms
    chances = planner.heads.probabilities(contexts)
    rtol, atol = (1e-5, 1e-37) if dtype == np.float32 else (1e-12, 1e-300)
    np.testing.assert_allclose(chances, np.asarray(logistic(odds), dtype=float), rtol=rtol, atol=atol)
    plan = planner.plan(contexts)
    expected = optimal_values(np.asarray(logistic(odds), dtype=float), planner.rewards, horizon)
    np.testing.assert_allclose(plan.continuations[:, :-1], expected, rtol=rtol, atol=atol)
    for bonus in ("value", "paper"):
        chosen = planner.plan(contexts, optimism=Optimism(beta=1.5, bonus=BONUSES[bonus])).optimistic
        assert ((chosen >= 0) & (chosen < len(theta))).all()
    assert np.isfinite(planner.slate_values(contexts, plan.arms)).all()


@pytest.mark.parametrize("shift", [0.0, 1e3, -1e5])
def test_widths_in_single_precision_survive_contexts_far_from_the_origin(shift: float) -> None:
    generator = np.random.default_rng(0)
    contexts = generator.normal(size=(300, 4)) + shift
    arms = generator.integers(0, 9, 300)
    precision = Precision.diagonal(np.ones(4), np.ones(9)).plus(
        ByArm(contexts, sessions=np.arange(300), arms=arms), np.full(300, 0.2)
    )
    planner = Planner(
        replace(AdditiveModel.prior(dim=4, arms=9, ridge=1.0), precision=precision), np.ones(9), horizon=1
    )
    actual = planner.heads.widths(contexts[:20])
    np.testing.assert_allclose(actual, np.sqrt(precision.squared_widths(contexts[:20])), rtol=1e-4)
    assert (actual**2 >= 1 / precision.arms * (1 - 1e-6)).all()


def test_rounding_makes_no_width_narrower_than_the_arm_alone_allows() -> None:
    # Centres at ±1000 and a context right on one of them: the square that is left is lost in single precision.
    precision = Precision(context=np.array([[1 + 2e12]]), cross=np.array([[1e9], [-1e9]]), arms=np.array([1e6, 1e6]))
    known = replace(AdditiveModel.prior(dim=1, arms=2, ridge=1.0), precision=precision)
    planner = Planner(known, np.ones(2), horizon=1)
    contexts = np.linspace(999, 1001, 64)[:, None]
    assert (planner.heads.widths(contexts) >= 1e-3 * (1 - 1e-6)).all()


# ── values of given slates ───────────────────────────────────────────────────────────────────────────────────────────


@given(seeds, st.integers(1, 5), st.integers(1, 5), st.integers(0, 5))
@lawful
def test_a_slate_is_worth_the_same_counted_backwards_and_forwards(seed, arms, horizon, shown) -> None:
    planner, generator = planner_of(seed, arms, horizon)
    contexts = generator.normal(size=(3, 2))
    slates = generator.integers(0, arms, (3, horizon))
    slates[:, shown:] = NO_ARM
    values = planner.slate_values(contexts, slates)
    assert values.dtype == np.float64
    for row, chances in enumerate(probabilities(planner.model, contexts)):
        for h in range(horizon):
            rest = [arm for arm in slates[row, h:].tolist() if arm != NO_ARM]
            assert values[row, h] == pytest.approx(slate_value(chances, planner.rewards, rest), abs=1e-13)


# ── edges ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("excluded", [None, [], [[], []]])
def test_no_exclusions_are_no_mask(excluded: list[list[int]] | None) -> None:
    planner, _ = planner_of(0, 3, 2)
    assert planner.masked(excluded) is None


def test_excluding_an_arm_twice_or_one_that_is_retired_is_the_same_as_once_or_not_at_all() -> None:
    planner, _ = planner_of(0, 3, 2, active=[True, False, True])
    contexts = np.ones((1, 2))
    once = planner.plan(contexts, planner.masked([[0]]))
    assert np.array_equal(planner.plan(contexts, planner.masked([[0, 1, 0]])).arms, once.arms)
    assert once.arms.tolist() == [[2, 2]]
    assert np.array_equal(planner.plan(contexts, planner.masked([[1]])).arms, planner.plan(contexts).arms)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": [1.0, 1.0]}, "shape"),
        ({"rewards": [1.0, 1.0, np.nan]}, "not finite"),
    ],
)
def test_planner_settings_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    given_options = {"rewards": np.ones(3), "horizon": 2, **options}
    with pytest.raises(InputError, match=message):
        Planner(AdditiveModel.prior(dim=2, arms=3, ridge=1.0), **given_options)


@pytest.mark.parametrize("shape", [(4, 1), (4, 3), (2,), (1, 1, 2)])
def test_contexts_of_the_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    planner, _ = planner_of(0, 3, 2)
    with pytest.raises(InputError, match="contexts of shape"):
        planner.plan(np.zeros(shape))
